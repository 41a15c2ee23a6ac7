# SPDX-License-Identifier: Apache-2.0
"""What a run of benchmarks/serve.py measured, and the names of its files."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from serve_cases import RELEASED_HEADS

Row = dict[str, Any]
STEMS = {"serve": "serving", "steps": "engine_steps"}
SPARSE_STEMS = {"serve": "sparse_serving", "steps": "sparse_steps"}


@dataclass
class Report:
    """One run. `rows` hold what was measured and what was not, in the order it came."""

    mode: str
    command: str
    machine: Row
    settings: Row
    rows: list[Row] = field(default_factory=list)

    @classmethod
    def read(cls, path: Path) -> "Report":
        return cls(**json.loads(path.read_text()))

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

    def write_json(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{self.stem}.json").write_text(json.dumps(asdict(self), indent=1) + "\n")

    @property
    def backends(self) -> list[str]:
        return list(dict.fromkeys(row["backend"] for row in self.rows))
