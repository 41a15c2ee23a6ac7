# SPDX-License-Identifier: Apache-2.0
"""One cycle of the steady loop: each stage once, each on a block of its own."""

from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from numbers import Integral

from mla_kernels import checks
from mla_kernels.pipeline.chain import Chain


def earliest_starts(
    times: Sequence[Fraction],
    cube_order: Sequence[int],
    vector_order: Sequence[int],
    internal: AbstractSet[int],
) -> dict[int, Fraction] | None:
    """Start of each stage within a cycle, in an order of issue; None if they wait in a circle."""
    queues = ([2 * i - 2 for i in cube_order], [2 * i - 1 for i in vector_order])
    at, free = [0, 0], [Fraction(0), Fraction(0)]
    starts: dict[int, Fraction] = {}
    unit = waits = 0
    while len(starts) < len(times):
        queue = queues[unit]
        blocked = True
        while at[unit] < len(queue):
            stage = queue[at[unit]]
            start = free[unit]
            if stage - 1 in internal:
                if stage - 1 not in starts:
                    break
                start = max(start, starts[stage - 1] + times[stage - 1])
            starts[stage] = start
            free[unit] = start + times[stage]
            at[unit] += 1
            blocked = False
        waits = waits + 1 if blocked else 0
        if waits == 2:
            return None
        unit = 1 - unit
    return starts


@dataclass(frozen=True)
class Cycle:
    """The order of a cycle on both units, and which edges of the chain stay inside it.

    cube_order, vector_order: the numbers i of [Ci] and [Vi], 1 to n, as their unit runs them.
    internal: edges p (stage p to p + 1) whose two stages work on the same block in one cycle. At
    any other edge the consumer takes what an earlier cycle made.

    Raises ValueError if an argument is of another type, an order is not a permutation of 1 to n, an
    edge does not exist, or the internal edges contradict the orders.
    """

    chain: Chain
    cube_order: tuple[int, ...]
    vector_order: tuple[int, ...]
    internal: frozenset[int]

    def __post_init__(self) -> None:
        checks.check_type("chain", self.chain, Chain)
        n = self.chain.pairs
        for name, order in (("cube_order", self.cube_order), ("vector_order", self.vector_order)):
            whole = isinstance(order, Sequence) and _integers(order)
            if not whole or sorted(order) != list(range(1, n + 1)):
                raise ValueError(f"{name} must hold each of 1 to {n} once, got {order!r}")
        if not (isinstance(self.internal, AbstractSet) and _integers(self.internal)):
            raise ValueError(f"internal must be a set of edges, got {self.internal!r}")
        if not self.internal <= set(range(2 * n - 1)):
            raise ValueError(
                f"internal edges must be from 0 to {2 * n - 2}, got {sorted(self.internal)}"
            )
        if self._starts is None:
            raise ValueError(
                f"cube_order {self.cube_order} and vector_order {self.vector_order} allow no cycle "
                f"with {self.edges()} inside"
            )

    @cached_property
    def _starts(self) -> dict[int, Fraction] | None:
        return earliest_starts(self.chain.times, self.cube_order, self.vector_order, self.internal)

    @property
    def starts(self) -> dict[int, Fraction]:
        """Earliest start of each stage in the cycle, in an order of issue; what comes from earlier
        cycles is there at time 0."""
        assert self._starts is not None
        return self._starts

    @property
    def length(self) -> Fraction:
        """Duration of one cycle."""
        return max(start + self.chain.times[stage] for stage, start in self.starts.items())

    @property
    def stall_free(self) -> bool:
        """Whether the busier unit never waits in the steady loop."""
        return self.length == self.chain.bound

    @property
    def lags(self) -> tuple[int, ...]:
        """Cycles from a block's [C1] to each of its stages: the external edges up to there."""
        lags = [0]
        for edge in range(len(self.chain.times) - 1):
            lags.append(lags[-1] + (edge not in self.internal))
        return tuple(lags)

    @property
    def preload_count(self) -> int:
        """[C1] stages before the first full cycle: (2n - 1) - internal edges (Lemma B.1)."""
        return self.lags[-1]

    @property
    def preload_work(self) -> Fraction:
        """Time of all stages that run before the first full cycle, on both units together."""
        counts = (self.preload_count - lag for lag in self.lags)
        return sum((c * t for c, t in zip(counts, self.chain.times, strict=True)), Fraction(0))

    def edges(self) -> str:
        """The internal edges in words."""
        label = self.chain.label
        return ", ".join(f"{label(p)} -> {label(p + 1)}" for p in sorted(self.internal)) or "none"


def _integers(items: Iterable[object]) -> bool:
    return all(isinstance(item, Integral) for item in items)
