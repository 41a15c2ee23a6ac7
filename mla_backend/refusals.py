# SPDX-License-Identifier: Apache-2.0
"""Refusals of an engine, also for the server that started it.

Workers are processes of their own. If one refuses, vLLM tells the server no more than "Engine core
initialization failed", and the sentence that matters stands in the middle of a long log. So it is
also left in a file, where the server wants that.
"""

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

_FILE = "_MLA_REFUSAL_FILE"  # not a setting: the server's word to its engines


class RefusalError(ValueError):
    """What cannot be served, in words that name the mend."""

    def __init__(self, words: str) -> None:
        super().__init__(words)
        note(words)


def note(words: str) -> None:
    """Leave `words` for the server, if one listens."""
    if path := os.environ.get(_FILE):
        with contextlib.suppress(OSError):
            Path(path).write_text(words)


@contextlib.contextmanager
def heard() -> Iterator[Callable[[], str]]:
    """Listens to the engines started inside: gives a function for their last refusal, "" if none
    was, or nothing can be written on this machine: then vLLM does not start, and says so."""
    try:
        temporary = tempfile.TemporaryDirectory()
    except OSError:
        yield str
        return
    with temporary as folder:
        path = Path(folder) / "refusal"
        os.environ[_FILE] = str(path)
        try:
            yield lambda: path.read_text() if path.exists() else ""
        finally:
            del os.environ[_FILE]
