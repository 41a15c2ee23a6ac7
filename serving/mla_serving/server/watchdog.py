# SPDX-License-Identifier: Apache-2.0
"""Is the engine still working? vLLM notices a process that died, not one that hangs."""

import asyncio
import time
from typing import Any

# Rare enough that the gap it makes between two steps does not show.
_INTERVAL_SECONDS = 10.0


def is_retired(engine: Any) -> bool:
    """Whether elastic expert parallelism took this server's engine away: it has ended, and the
    server waits to be removed (vLLM 0.33)."""
    return bool(getattr(engine, "should_keep_api_server_alive", False))


class Watchdog:
    """Asks every worker of `engine` for a sign of life, between two steps, again and again.

    A step may take long, so `limit` seconds (0: any time) pass before silence counts. One question
    is open at a time: a hung engine is not buried under more of them, and is found well again as
    soon as it answers.
    """

    def __init__(self, engine: Any, limit: float) -> None:
        self._engine = engine
        self._limit = limit
        self._asked: float | None = None
        self._failure: str | None = None

    async def run(self) -> None:
        """Ask until cancelled."""
        while True:
            await asyncio.sleep(min(_INTERVAL_SECONDS, self._limit / 2 or _INTERVAL_SECONDS))
            self._asked = time.monotonic()
            try:
                await self._engine.collective_rpc("check_health")
                self._failure = None
            except Exception as error:
                self._failure = f"{type(error).__name__}: {error}"
            self._asked = None

    def complaint(self) -> str | None:
        """What is wrong with the engine, if anything is."""
        if is_retired(self._engine):
            return None
        if self._failure is not None:
            return f"A worker is not well: {self._failure}"
        if self._asked is not None and self._limit:
            silence = time.monotonic() - self._asked
            if silence > self._limit:
                return f"The engine has not answered for {silence:.0f} s."
        return None
