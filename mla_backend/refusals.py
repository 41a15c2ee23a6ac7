# SPDX-License-Identifier: Apache-2.0
"""Refusals of an engine, also for the server that started it.

Workers are processes of their own. If one refuses, or fails otherwise as it starts, vLLM tells the
server no more than "Engine core initialization failed", and the sentence that matters stands in the
middle of a long log. So it is also left in a file, where the server wants that.
"""

import contextlib
import logging
import os
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

_FILE = "_MLA_REFUSAL_FILE"  # not a setting: the server's word to its engines
# Python's own errors: "integer modulo by zero" says nothing to who started a server.
_NO_WORDS = ArithmeticError, AttributeError, LookupError, NameError, TypeError


class RefusalError(ValueError):
    """What cannot be served, in words that name the mend."""

    def __init__(self, words: str) -> None:
        super().__init__(words)
        note(words)


def cannot_serve(what: str) -> RefusalError:
    """The refusal of `what`: a noun, why, and the mend."""
    return RefusalError(f"mla-backend cannot serve {what}")


def listening(path: Path) -> dict[str, str]:
    """The environment of a process whose engines are to leave their words in `path`."""
    return {_FILE: str(path)}


def note(words: str) -> None:
    """Leave `words` for the server, if one listens."""
    if path := os.environ.get(_FILE):
        with contextlib.suppress(OSError):
            Path(path).write_text(words)


def note_first(words: str) -> None:
    """Leave `words` for the server, unless another process has left its own."""
    if (path := os.environ.get(_FILE)) and not Path(path).exists():
        note(words)


def place(error: BaseException) -> str:
    """Where `error` was raised, as the end of a sentence; "" if someone put it into words."""
    frames = traceback.extract_tb(error.__traceback__)
    if not frames or (str(error) and not isinstance(error, _NO_WORDS)):
        return ""
    return f", in {frames[-1].filename}, line {frames[-1].lineno} ({frames[-1].line})"


def described(error: BaseException) -> str:
    """Its class, its words if it has any, and its `place`."""
    name = type(error).__name__
    return (f"{name}: {error}" if str(error) else name) + place(error)


class _Failures(logging.Handler):
    """Notes the first exception of which vLLM logs that an engine or a worker "failed to start":
    the next one up only says that there was one."""

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if error and "failed to start" in str(record.msg):
            note_first(described(error))


_FAILURES = _Failures(logging.ERROR)


def note_failed_starts() -> None:
    """From here on in an engine's process, if a server listens; safe to call again."""
    if os.environ.get(_FILE):
        logging.getLogger("vllm").addHandler(_FAILURES)


@contextlib.contextmanager
def heard() -> Iterator[Callable[[], str]]:
    """Listens to the engines started inside: gives a function for their last refusal, or else the
    first failure of a start; "" if there was neither, or nothing can be written on this machine:
    then vLLM does not start, and says so."""
    try:
        temporary = tempfile.TemporaryDirectory()
    except OSError:
        yield str
        return
    with temporary as folder:
        path = Path(folder) / "refusal"
        os.environ.update(listening(path))
        try:
            yield lambda: path.read_text() if path.exists() else ""
        finally:
            del os.environ[_FILE]
