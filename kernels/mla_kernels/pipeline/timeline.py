# SPDX-License-Identifier: Apache-2.0
"""The two phases of a whole loop, preload and steady cycles, then the drain, on two units."""

from dataclasses import dataclass
from fractions import Fraction

from mla_kernels import checks
from mla_kernels.pipeline.chain import UNITS
from mla_kernels.pipeline.cycle import Cycle


@dataclass(frozen=True)
class Event:
    """One stage of one block. unit: CUBE or VECTOR; phase: "preload", "steady" or "drain"."""

    unit: int
    stage: int
    block: int
    start: Fraction
    end: Fraction
    phase: str


@dataclass(frozen=True)
class Timeline:
    """What ran when, in order of issue."""

    cycle: Cycle
    blocks: int
    events: tuple[Event, ...]

    @property
    def end(self) -> Fraction:
        return max(event.end for event in self.events)

    @property
    def serial(self) -> Fraction:
        """The same work with one stage after another (the naive execution of section 4.1)."""
        return self.blocks * sum(self.cycle.chain.times, Fraction(0))

    def busy(self, unit: int) -> Fraction:
        """Share of the whole timeline during which CUBE or VECTOR works."""
        work = sum((e.end - e.start for e in self.events if e.unit == unit), Fraction(0))
        return work / self.end

    def stalls(self, unit: int) -> Fraction:
        """Time that CUBE or VECTOR waits between its first and its last steady stage."""
        steady = [e for e in self.events if e.unit == unit and e.phase == "steady"]
        if not steady:
            return Fraction(0)
        work = sum((e.end - e.start for e in steady), Fraction(0))
        return max(e.end for e in steady) - min(e.start for e in steady) - work

    def summary(self) -> str:
        """A few lines: orders, preload count, times."""
        cycle, chain = self.cycle, self.cycle.chain
        names = [
            " ".join(chain.label(2 * i - 2 + unit) for i in order)
            for unit, order in enumerate((cycle.cube_order, cycle.vector_order))
        ]
        busy = ", ".join(f"{name} {float(self.busy(u)):.1%}" for u, name in enumerate(UNITS))
        return "\n".join(
            [
                f"cycle          cube {names[0]} | vector {names[1]}",
                f"inside it      {cycle.edges()}",
                f"preload count  {cycle.preload_count} (n = {chain.pairs})",
                f"cycle length   {float(cycle.length):g} (busier unit {float(chain.bound):g})",
                f"{self.blocks} blocks".ljust(15)
                + f"{float(self.end):g} (one stage after another {float(self.serial):g})",
                f"busy           {busy}",
            ]
        )


def simulate(cycle: Cycle, blocks: int) -> Timeline:
    """Run `blocks` blocks through a cycle's order; each unit takes its stages in that order.

    A stage starts once its unit is free and its producer is done; the first full cycle starts once
    the preload is over (paper, section 4.1.1). With a stall-free cycle the busier unit then never
    waits. Raises ValueError for blocks that are no integer of at least 1.
    """
    checks.check_type("cycle", cycle, Cycle)
    checks.check_range("blocks", blocks, 1, 2**31 - 1)
    times, lags, count = cycle.chain.times, cycle.lags, cycle.preload_count
    events: list[Event] = []
    ends: dict[tuple[int, int], Fraction] = {}
    free = [Fraction(0), Fraction(0)]
    for turn in range(-count, blocks):
        if turn == 0:
            free = [max(free)] * 2
        phase = "preload" if turn < 0 else "steady" if turn < blocks - count else "drain"
        for stage in cycle.starts:
            block = turn + count - lags[stage]
            if not 0 <= block < blocks:
                continue
            start = free[stage % 2]
            if stage:
                start = max(start, ends[stage - 1, block])
            free[stage % 2] = ends[stage, block] = start + times[stage]
            events.append(Event(stage % 2, stage, block, start, start + times[stage], phase))
    return Timeline(cycle, blocks, tuple(events))
