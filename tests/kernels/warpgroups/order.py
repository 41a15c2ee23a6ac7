# SPDX-License-Identifier: Apache-2.0
"""What must come before what, whatever ran first.

An event is one bit. A warpgroup knows the events that certainly came before what it does now; a
barrier hands on what those that arrived at it knew. An access that does not know the ones it
conflicts with is a fault in a run where they happen to be in order, too.
"""

from dataclasses import dataclass, field


@dataclass
class Event:
    bit: int
    who: str
    writes: bool
    by_async: bool  # by the asynchronous proxy: TMA and wgmma

    def __str__(self):
        return f"{'write' if self.writes else 'read'} by {self.who}"


@dataclass
class Known:
    """`fenced`: what the asynchronous proxy sees of it."""

    events: int = 0
    fenced: int = 0

    def add(self, other):
        self.events |= other.events
        self.fenced |= other.fenced


@dataclass
class Place:
    """A part of shared memory that is written as a whole, with the events since the last write."""

    name: str
    value: object = None
    events: list[Event] = field(default_factory=list)

    def access(self, event, by):
        """What is wrong with it."""
        faults = []
        for before in self.events:
            if not (before.writes or event.writes):
                continue
            if not by.events & before.bit:
                faults.append(f"{self.name}: {event} races with {before}")
            elif before.writes and event.by_async > before.by_async and not by.fenced & before.bit:
                faults.append(f"{self.name}: no fence between {before} and {event}")
        self.events = [event] if event.writes else [*self.events, event]
        return faults


@dataclass
class Phase:
    arrivals: int
    bytes: int = 0
    known: Known = field(default_factory=Known)
    after: int = 0  # its end comes after these, which copies that arrive do not hand on


@dataclass
class Barrier:
    name: str
    count: int
    phases: list[Phase] = field(default_factory=list)
    waits: dict[str, list[tuple[int, int]]] = field(default_factory=dict)  # phase, event

    def __post_init__(self):
        self.phases.append(Phase(self.count))

    @property
    def now(self):
        """The phase that has not ended."""
        return len(self.phases) - 1

    def arrive(self, after, known, count=0, bytes_=0):
        phase = self.phases[-1]
        phase.arrivals -= count
        phase.bytes -= bytes_
        phase.after |= after
        phase.known.add(known)
        assert phase.arrivals >= 0, f"{self.name}: more arrivals than {self.count}"
        if phase.arrivals == phase.bytes == 0:
            self.phases.append(Phase(self.count))

    def awaited(self, known, parity):
        """The phase whose end a warpgroup waits for: the last that it knows some warpgroup saw the
        end of, or the next."""
        last = -1
        for waits in self.waits.values():
            seen = (phase for phase, event in reversed(waits) if known.events & event)
            last = max(last, next(seen, -1))
        return last + (last % 2 != parity)

    def faults(self):
        """Loads that nobody waited for, and waits that would never end if the warpgroup came late:
        a phase ahead, parity is the same as before."""
        if self.phases[-1].bytes:
            yield f"{self.name}: the program ends before its loads"
        for who, waits in self.waits.items():
            for phase, event in waits:
                if phase + 1 < self.now and not self.phases[phase + 1].after & event:
                    yield f"{self.name}: phase {phase + 1} may end before {who} sees {phase} end"
