# SPDX-License-Identifier: Apache-2.0
"""The gate of a server of several HTTP processes: one count of requests for all of them."""

import asyncio
import multiprocessing
import time

_POLL_SECONDS = 0.02
# A process that is killed while it counts keeps the lock: whoever ends the server waits no longer.
_LOCK_SECONDS = 1.0


class SharedGate:
    """As `admission.Gate`, in memory that processes share which are started with it (spawned).

    A request of any of them is counted at once for all, so that the limit is exact. What a process
    that died had counted stays: the server ends then.
    """

    def __init__(self, limit: int = 0) -> None:
        context = multiprocessing.get_context("spawn")
        self.limit = limit
        self._lock = context.Lock()
        self._running = context.RawValue("q", 0)
        self._refused = context.RawValue("q", 0)
        self._draining = context.RawValue("b", 0)

    @property
    def running(self) -> int:
        return int(self._running.value)

    @property
    def refused(self) -> int:
        return int(self._refused.value)

    @property
    def draining(self) -> bool:
        return bool(self._draining.value)

    @draining.setter
    def draining(self, closed: bool) -> None:
        # Under the lock: who has not been counted by now is refused.
        locked = self._lock.acquire(timeout=_LOCK_SECONDS)
        self._draining.value = closed
        if locked:
            self._lock.release()

    def enter(self, limited: bool = False) -> bool:
        with self._lock:
            running = self._running.value
            if self._draining.value or (limited and 0 < self.limit <= running):
                self._refused.value += 1
                return False
            self._running.value = running + 1
            return True

    def leave(self) -> None:
        with self._lock:
            self._running.value -= 1

    async def wait_idle(self, timeout: float) -> bool:
        deadline = time.monotonic() + timeout
        while self.running:
            if time.monotonic() >= deadline:
                return False
            await asyncio.sleep(_POLL_SECONDS)
        return True
