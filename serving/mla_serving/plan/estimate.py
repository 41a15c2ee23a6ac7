# SPDX-License-Identifier: Apache-2.0
"""What a call of a kernel takes, by those that were measured."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from mla_serving.plan.rates import Case

# Times the least measured: more than a launch. No measured call is near it, from 1.21 up to 1.49.
_BUSY = 1.35
# Estimates of more requests bound one, as they can be lower where the nearest cases change. Small
# steps let the bound itself fall by little from one number of requests to the next.
_MORE_REQUESTS = tuple(1.05**power for power in range(1, 29))  # up to 3.9 times as many

# Microseconds of computing and of reading, of a call by its batch, heads and context.
Floor = Callable[[int, int, float], tuple[float, float]]
Estimate = tuple[float, Case]  # microseconds of a call, and the case that they are by


@dataclass(frozen=True)
class Call:
    """One call, by the `cases` that were measured: `attention.KernelTime` says how.

    rows_cost  whether a row costs beside its keys, which no floor counts, as the indexer's top-k
               does: the time of as long rows is a power of their number between two busy calls,
               and up to twice as many as the most take as many times its time
    """

    cases: list[Case]
    floor: Floor
    batch: int
    rows: int
    context: float
    rows_cost: bool

    def time(self) -> Estimate:
        """No more than the same call with more requests. Not so of an indexer, whose measured steps
        such a bound would miss: beyond twice the most rows its estimate falls by up to a fifth."""
        if self.rows_cost:
            return self._by_cases()
        more = [replace(self, batch=math.ceil(self.batch * times)) for times in _MORE_REQUESTS]
        return min((call._by_cases() for call in (self, *more)), key=lambda x: x[0])

    def _by_cases(self) -> Estimate:
        estimate = self._by_rows() or self._between() or self._by_ratio()
        return self._bounded(estimate)

    def _by_rows(self) -> Estimate | None:
        """Between two busy calls of as long rows, or up to twice as many as of the last."""
        if not self.rows_cost:
            return None
        least_us = min(case.us for case in self.cases)
        alike = [c for c in self.cases if (c.rows, c.context) == (self.rows, self.context)]
        alike = sorted((c for c in alike if c.us >= _BUSY * least_us), key=lambda c: c.batch)
        fewer = [c for c in alike if c.batch <= self.batch]
        more = [c for c in alike if c.batch > self.batch]
        if not fewer or not (more or self.batch <= 2 * fewer[-1].batch):
            return None
        case = fewer[-1]
        power = 1.0
        if more:
            power = math.log(more[0].us / case.us) / math.log(more[0].batch / case.batch)
        return case.us * (self.batch / case.batch) ** power, case

    def _between(self) -> Estimate | None:
        """By its floor between those of two cases: a multiple of a small case would be one of its
        launch."""
        here = self._floor_us()
        below = [case for case in self.cases if self._floor_us(case) < here]
        above = [case for case in self.cases if self._floor_us(case) >= here]
        if not below or not above:
            return None
        low, high = self._nearest(below), self._nearest(above)
        share = (here - self._floor_us(low)) / (self._floor_us(high) - self._floor_us(low))
        return low.us + share * (high.us - low.us), self._nearest(self.cases)

    def _by_ratio(self) -> Estimate:
        case = self._nearest(self.cases)
        return case.us * self._floor_us() / self._floor_us(case), case

    def _bounded(self, estimate: Estimate) -> Estimate:
        """No less than a smaller call was measured to take, no more than a larger one, nor than
        this one with the next number of rows."""
        batch, rows, context = self.batch, self.rows, self.context
        cases = self.cases
        smaller = [c for c in cases if c.batch <= batch and c.rows <= rows and c.context <= context]
        least = max(smaller, key=lambda c: c.us, default=min(cases, key=lambda c: c.us))
        larger = [c for c in cases if c.batch >= batch and c.rows >= rows and c.context >= context]
        bounds = [(most.us, most) for most in larger]
        more_rows = min((c.rows for c in cases if c.rows > rows), default=None)
        if more_rows is not None:
            bounds.append(replace(self, rows=more_rows)._by_cases())
        found = max(estimate, (least.us, least), key=lambda x: x[0])
        return min([found, *bounds], key=lambda x: x[0])

    def _floor_us(self, case: Case | None = None) -> float:
        """Of a measured case, or of this call."""
        of = case or self
        return max(self.floor(of.batch, of.rows, of.context))

    def _nearest(self, some: list[Case]) -> Case:
        return min(some, key=lambda case: case.distance(self.batch, self.rows, self.context))
