# SPDX-License-Identifier: Apache-2.0
"""The chain of stages that every block of the loop goes through."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from numbers import Rational, Real

CUBE, VECTOR = 0, 1
UNITS = ("cube", "vector")


@dataclass(frozen=True)
class Chain:
    """[C1] -> [V1] -> ... -> [Cn] -> [Vn] (paper, section 4.1).

    A stage is named by its place p in the chain, 0 to 2n - 1; edge p leads from stage p to p + 1.
    Durations are exact fractions, so that a stage that just fits does fit: of a float the decimal
    that it prints as, since 0.1 + 0.2 is no 0.3 in binary.
    """

    times: tuple[Fraction, ...]

    def __post_init__(self) -> None:
        given = self.times
        exact = isinstance(given, tuple) and all(isinstance(time, Fraction) for time in given)
        if not exact or len(given) % 2 or not any(given) or min(given) < 0:
            raise ValueError(f"times must be those of Chain.of, got {given!r}")

    @classmethod
    def of(cls, durations: Iterable[float]) -> "Chain":
        """The chain of durations [C1], [V1], [C2], ...; an odd count ends in [Vn] = 0.

        Raises ValueError for no duration, one that is negative or not finite, or only zeros.
        """
        try:
            times = list(durations)
        except TypeError:
            raise ValueError(f"durations must be a list of numbers, got {durations!r}") from None
        for time in times:
            if not isinstance(time, Real) or not _finite(time) or time < 0:
                raise ValueError(f"durations must be finite numbers >= 0, got {time!r}")
        if not any(times):
            raise ValueError(f"durations need at least one above 0, got {times}")
        exact = [
            # NumPy's integers overflow where they stay in a fraction, and its floats of fewer bits
            # print fewer digits than the fp64 next to them.
            Fraction(int(t.numerator), int(t.denominator))
            if isinstance(t, Rational)
            else Fraction(str(t))
            for t in times
        ]
        return cls((*exact, *[Fraction(0)] * (len(times) % 2)))

    @property
    def pairs(self) -> int:
        """n, the number of [C] [V] pairs."""
        return len(self.times) // 2

    def work(self, unit: int) -> Fraction:
        """Time that one block takes on CUBE or VECTOR."""
        return sum(self.times[unit::2], Fraction(0))

    @property
    def bound(self) -> Fraction:
        """The busier unit's work: no cycle that runs each stage once is shorter."""
        return max(self.work(CUBE), self.work(VECTOR))

    def label(self, stage: int) -> str:
        return f"{'CV'[stage % 2]}{stage // 2 + 1}"


def _finite(time: Real) -> bool:
    """As fp64, which an integer may be too large for."""
    try:
        return math.isfinite(time)
    except OverflowError:
        return False
