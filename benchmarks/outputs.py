# SPDX-License-Identifier: Apache-2.0
"""Where results go: a folder tried before anything is measured, and files that are whole; and how
a result names the command that made it."""

import json
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Any


def claim(folder: Path) -> None:
    """Make `folder` and try a file in it, so that hours of measuring are not lost at their end.
    SystemExit where that fails."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise SystemExit(f"results cannot be written to {folder}: {error}") from error


def command(name: str, words: list[str] | None = None) -> str:
    """`python benchmarks/NAME.py` with `words`, or with what this program was called with, but for
    where its results went."""
    kept, skip = [], False
    for word in sys.argv[1:] if words is None else words:
        if not skip and word.partition("=")[0] != "--results":
            kept.append(word)
        skip = word == "--results"
    return shlex.join(["python", f"benchmarks/{name}.py", *kept])


def write(path: Path, text: str) -> None:
    """The whole of a file or nothing: who is killed meanwhile leaves the one that was there."""
    part = path.with_name(f".{path.name}.part")
    part.write_text(text)
    part.replace(path)


def write_json(path: Path, result: Any) -> None:
    write(path, json.dumps(result, indent=1) + "\n")
