# SPDX-License-Identifier: Apache-2.0
"""The results of benchmarks/serve.py: JSON, a page and a plot."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from serve_cases import RELEASED_HEADS
from serve_pages import plot_serve, serve_lines
from step_pages import plot_steps, steps_lines

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

    def write(self, folder: Path) -> None:
        """serving or engine_steps, .json, .md and .png."""
        self.write_json(folder)
        (folder / f"{self.stem}.md").write_text(self.markdown())
        try:
            import matplotlib
        except ImportError:
            print("matplotlib is not installed: no plot")
            return
        matplotlib.use("Agg")
        draw = plot_steps if self.mode == "steps" else plot_serve
        draw(self, folder / f"{self.stem}.png")

    def markdown(self) -> str:
        title = "Decode steps in the engine" if self.mode == "steps" else "Serving on a GPU"
        machine = ", ".join(f"{k} {v}" for k, v in self.machine.items())
        lines = [f"# {title}", "", f"{machine}.", "", f"`{self.command}`", ""]
        lines += (steps_lines if self.mode == "steps" else serve_lines)(self)
        left_out = [row for row in self.rows if "error" in row or "not_run" in row]
        if left_out:
            lines += ["", "Not measured:", ""]
            for row in left_out:
                case = " ".join(f"{k} {v}" for k, v in row.items() if k not in ("error", "not_run"))
                lines.append(f"* {case}: {row.get('error') or row['not_run']}")
        return "\n".join(lines) + "\n"

    @property
    def backends(self) -> list[str]:
        return list(dict.fromkeys(row["backend"] for row in self.rows))
