# SPDX-License-Identifier: Apache-2.0
"""Plain lines on standard output that say how far the start-up is."""

import errno
import io
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_HEARTBEAT_SECONDS = 15.0
_STDOUT = 1  # the descriptor
_NOBODY_READS = (errno.EPIPE, errno.EIO)  # of a pipe, of a terminal


def any_letter() -> None:
    """From here on a letter of a path that this locale cannot write comes out as its code, as on
    stderr."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")


def say(text: str) -> None:
    """Print `text`, into nothing once nobody reads: the Ctrl-C that begins a drain ends the `tee`
    that the output goes through, and a terminal may go. Of what cannot be written for another
    reason, as to a full disk, that line alone is lost."""
    try:
        print(text, flush=True)
    except OSError as error:
        stdout, nothing = os.dup(_STDOUT), os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, _STDOUT)
        with suppress(OSError):  # what is still buffered would fail again, at the exit too
            sys.stdout.flush()
        if error.errno not in _NOBODY_READS:
            os.dup2(stdout, _STDOUT)
        os.close(stdout)
        os.close(nothing)


class Progress:
    """Lines stamped with the seconds since this object was made."""

    def __init__(self) -> None:
        self._start = time.monotonic()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._start

    def line(self, text: str) -> None:
        say(f"mla-backend [{self.seconds:6.1f} s] {text}")

    @contextmanager
    def waiting(self, text: str) -> Iterator[None]:
        """Say `text`, and again every 15 s while the block runs (from a thread: it may block)."""
        self.line(text)
        done = threading.Event()

        def repeat() -> None:
            while not done.wait(_HEARTBEAT_SECONDS):
                self.line(f"still {text}")

        thread = threading.Thread(target=repeat, daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()
