# SPDX-License-Identifier: Apache-2.0
"""How a benchmark ends when it is told to: with everything that it started."""

import signal
from types import FrameType


def exit_on_signals() -> None:
    """SIGTERM and SIGHUP raise SystemExit, so that what was started is stopped on the way out. By
    default they end this process alone, and servers would go on without it."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, leave)
