# SPDX-License-Identifier: Apache-2.0
"""What a run of benchmarks/serve.py measured, and the names of its files."""

import json
from argparse import ArgumentTypeError
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from outputs import write_json
from serve_cases import RELEASED_HEADS

Row = dict[str, Any]
STEMS = {"serve": "serving", "steps": "engine_steps"}
SPARSE_STEMS = {"serve": "sparse_serving", "steps": "sparse_steps"}


@dataclass
class Report:
    """One run. `rows` hold what was measured and what was not, in the order it came; `note` is what
    a reader must know of the run beside it."""

    mode: str
    command: str
    machine: Row
    settings: Row
    rows: list[Row] = field(default_factory=list)
    note: str = ""

    @classmethod
    def read(cls, path: Path) -> "Report":
        return cls(**json.loads(path.read_text()))

    @classmethod
    def path(cls, text: str) -> Path:
        """The argument that names a result; ArgumentTypeError if no result is there."""
        try:
            cls.read(Path(text))
        except (OSError, TypeError, ValueError) as error:
            raise ArgumentTypeError(f"{text} is no result of serve.py: {error}") from error
        return Path(text)

    @property
    def stem(self) -> str:
        sparse = self.settings.get("family") == "v3.2"
        stem = (SPARSE_STEMS if sparse else STEMS)[self.mode]
        if self.settings.get("as_is"):
            stem += f"_{self.settings['model']}"
        elif self.mode == "serve" and self.settings["heads"][0] < RELEASED_HEADS:
            stem += f"_{self.settings['heads'][0]}_heads"
        quantised = self.settings.get("kv_cache_dtype", "auto")
        return stem if quantised == "auto" else f"{stem}_{quantised}"

    def write_json(self, folder: Path, ending: str = "") -> None:
        write_json(folder / f"{self.stem}{ending}.json", asdict(self))

    def add(self, row: Row) -> None:
        """`row`, which may be there already and have become longer."""
        if not any(row is there for there in self.rows):
            self.rows.append(row)

    @property
    def backends(self) -> list[str]:
        return list(dict.fromkeys(row["backend"] for row in self.rows))
