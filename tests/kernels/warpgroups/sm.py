# SPDX-License-Identifier: Apache-2.0
"""One program on a modelled SM: its warpgroups in turns, and copies that land some time later."""

import threading

import numpy as np

from tests.kernels.warpgroups.order import Barrier, Event, Known
from tests.kernels.warpgroups.values import Value, known


class StoppedError(Exception):
    """All that is left waits for ever."""


class Copy:
    """Of one cp.async, or all that TMA loads at once."""

    def __init__(self, event):
        self.event = event
        self.landed = False


class Warpgroup(threading.Thread):
    def __init__(self, sm, name, function, args):
        super().__init__(name=name, daemon=True)
        self.sm = sm
        self.job = function, args
        self.known = Known()
        self.turn = threading.Event()
        self.ready = lambda: True
        self.waits_for = ""
        self.copies = []  # all of them
        self.told = 0  # so many of them an mbarrier hears of
        self.groups = []  # how many copies there were at each commit
        self.products = []
        self.stores = []  # by TMA, whose tiles have not been read
        self.over = False
        self.error = None

    def run(self):
        function, args = self.job
        try:
            self.turn.wait()
            if not self.sm.stopped:
                function(*args)
                self.end()
        except StoppedError:
            pass
        except BaseException as error:
            self.error = error
        self.over = True
        self.sm.turn.set()

    def end(self):
        """Shared memory may be another program's as soon as this one has ended."""
        if any(not self.known.events & copy.event.bit for copy in self.copies) or self.stores:
            self.sm.faults.append(f"{self.name} ends before its copies")


class SM:
    """`choose(warpgroups, copies)`: which of those that can goes on, or lands. Faults go to
    `faults`, what is stored in global memory to `stored`, elements by name."""

    def __init__(self, choose, memory):
        self.choose = choose
        self.memory = memory
        self.faults = []
        self.stored = {}
        self.warpgroups = []
        self.flying = []  # what happens when a copy lands
        self.events = 0
        self.turn = threading.Event()
        self.stopped = False

    @property
    def me(self):
        return threading.current_thread()

    def run(self, jobs, barriers):
        self.warpgroups = [Warpgroup(self, f"WG{i}", *job) for i, job in enumerate(jobs)]
        for warpgroup in self.warpgroups:
            warpgroup.start()
        while left := [w for w in self.warpgroups if not w.over]:
            able = [w for w in left if w.ready()]
            if not able and not self.flying:
                stuck = ", ".join(f"{w.name} for {w.waits_for}" for w in left)
                self.faults.append(f"all wait: {stuck}")
                break
            chosen = self.choose(able, self.flying)
            if chosen in self.flying:
                self.flying.remove(chosen)
                chosen()
            else:
                self.turn.clear()
                chosen.turn.set()
                self.turn.wait()
                if chosen.error:
                    break
        self.stopped = True
        for warpgroup in self.warpgroups:
            warpgroup.turn.set()
            warpgroup.join()
        for warpgroup in self.warpgroups:
            if warpgroup.error:
                raise warpgroup.error
        for barrier in barriers:
            self.faults += barrier.faults()

    def let_others(self, ready=lambda: True, waits_for=""):
        """Go on when it is this warpgroup's turn again, and it is ready."""
        me = self.me
        me.ready, me.waits_for = ready, waits_for
        me.turn.clear()
        self.turn.set()
        me.turn.wait()
        if self.stopped:
            raise StoppedError

    def event(self, writes=False, by_async=False):
        self.events += 1
        return Event(1 << self.events, self.me.name, writes, by_async)

    def access(self, place, writes=False, by_async=False, later=False):
        """`later`: it ends some time later, until when nobody knows it."""
        if not self.warpgroups:
            return None  # while the barriers are made
        event = self.event(writes, by_async)
        self.faults += place.access(event, self.me.known)
        if not later:
            self.me.known.events |= event.bit
        return event

    def fence(self):
        if self.warpgroups:  # not while the barriers are made
            self.me.known.fenced |= self.me.known.events

    # mbarriers

    def arrive(self, bar, count=1, pred=True):
        if pred:
            bar.barrier.arrive(self.me.known.events, self.me.known, count)
            self.let_others()

    def expect(self, bar, size, pred=True):
        if pred:
            bar.barrier.phases[-1].bytes += size
            self.arrive(bar)

    def wait(self, bar, parity):
        barrier: Barrier = bar.barrier
        me, parity = self.me, int(parity)
        phase = barrier.awaited(me.known, parity)
        self.let_others(lambda: barrier.now % 2 != parity, f"{barrier.name}, phase {phase}")
        if barrier.now <= phase:
            self.faults.append(f"{barrier.name}: {me.name} did not wait for phase {phase}")
        event = self.event()
        barrier.waits.setdefault(me.name, []).append((phase, event.bit))
        me.known.events |= event.bit
        if phase >= 0:
            me.known.add(barrier.phases[phase].known)

    # Copies

    def tma_load(self, desc, at, bar, tile, pred=True):
        if not pred:
            return
        event = self.access(tile.place, writes=True, by_async=True, later=True)
        before, size = self.me.known.events, tile.itemsize * int(np.prod(tile.shape))
        self.flying.append(lambda: bar.barrier.arrive(before, Known(event.bit), bytes_=size))
        self.let_others()

    def tma_store(self, desc, at, tile):
        """`desc`: the name of what it writes, rows of 512."""
        self.me.stores.append(self.access(tile.place, by_async=True, later=True))
        rows, columns = (int(i) + np.arange(n) for i, n in zip(at, tile.shape, strict=True))
        self.stored.setdefault(desc, []).extend((512 * rows[:, None] + columns).ravel().tolist())
        self.let_others()

    def tma_store_wait(self, pending):
        assert pending == 0
        for event in self.me.stores:
            self.me.known.events |= event.bit
        self.me.stores = []

    def copy_to_shared(self, tile, source, mask):
        assert np.shape(source.at) == tuple(tile.shape)
        copy = Copy(self.access(tile.place, writes=True, later=True))
        self.me.copies.append(copy)
        self.flying.append(lambda: setattr(copy, "landed", True))

    def copies_arrive(self, bar, increment_count):
        """When all copies of each of the 128 threads have landed."""
        assert not increment_count
        before, copies = self.me.known.events, self.me.copies[self.me.told :]
        bits = sum(copy.event.bit for copy in copies)
        self.me.told = len(self.me.copies)

        def arrive():
            if all(copy.landed for copy in copies):
                bar.barrier.arrive(before, Known(bits), 128)
            else:
                self.flying.append(arrive)

        self.flying.append(arrive)
        self.let_others()

    def commit_group(self):
        self.me.groups.append(len(self.me.copies))

    def wait_group(self, pending):
        me = self.me
        groups = me.groups[: len(me.groups) - pending]
        old = me.copies[: groups[-1] if groups else 0]
        self.let_others(lambda: all(copy.landed for copy in old), "its copies")
        for copy in old:
            me.known.events |= copy.event.bit

    # wgmma

    def multiply(self, a, b, acc, use_acc=True, is_async=False):
        read = [x.place for x in (a, b) if hasattr(x, "place")]
        self.me.products.append([self.access(x, by_async=True, later=True) for x in read])
        self.let_others()
        return Value()

    def multiply_wait(self, pending, deps):
        products = self.me.products
        over = products[: len(products) - pending]
        self.me.products = products[len(over) :]
        self.me.known.events |= sum(event.bit for events in over for event in events)
        return deps if len(deps) > 1 else deps[0]

    # Global memory

    def load(self, pointer, mask=True, other=0):
        array = self.memory.get(pointer.name)
        if array is None:
            return Value()
        at, ok = np.broadcast_arrays(pointer.at, known(mask))
        assert ((at >= 0) & (at < array.size) | ~ok).all(), f"out of {pointer.name}"
        return Value(np.where(ok, array[np.where(ok, at, 0)], known(other))[()])

    def store(self, pointer, value, mask):
        at, ok = np.broadcast_arrays(pointer.at, known(mask))
        self.stored.setdefault(pointer.name, []).extend(at[ok].tolist())
