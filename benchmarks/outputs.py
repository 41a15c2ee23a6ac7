# SPDX-License-Identifier: Apache-2.0
"""Where results go: a folder tried before anything is measured, and files that are whole."""

import json
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


def write(path: Path, text: str) -> None:
    """The whole of a file or nothing: who is killed meanwhile leaves the one that was there."""
    part = path.with_name(f".{path.name}.part")
    part.write_text(text)
    part.replace(path)


def write_json(path: Path, result: Any) -> None:
    write(path, json.dumps(result, indent=1) + "\n")
