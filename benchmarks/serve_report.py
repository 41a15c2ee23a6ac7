# SPDX-License-Identifier: Apache-2.0
"""The results of benchmarks/serve.py as JSON, Markdown tables and plots."""

import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from load import METRICS, STATISTICS
from serve_cases import FEWEST, FP8_QUERY, LABELS, OURS, RELEASED_HEADS, Shape

Row = dict[str, Any]
STEMS = {"serve": "serving", "steps": "engine_steps"}
SPARSE_STEMS = {"serve": "sparse_serving", "steps": "sparse_steps"}
FEW_LAYERS = 16  # below, a step takes no longer than its host needs with many clients
MEANS = {"step_ms": "Whole steps", "gpu_ms": "GPU", "attention_ms": "Attention"}
COLOURS = {
    OURS: "tab:red",
    FP8_QUERY: "tab:orange",
    "FLASHMLA": "tab:blue",
    "FLASH_ATTN_MLA": "tab:green",
}


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


def label(backend: str) -> str:
    return LABELS.get(backend, backend)


def steps_lines(report: Report) -> list[str]:
    settings = report.settings
    sparse = settings.get("family") == "v3.2"
    model = settings["model"] if settings["as_is"] else (
        "dense layers of DeepSeek-V3's width, as many as a heading says, 128 heads, or 16 with an "
        "eighth of the MLP as on one of 8 tensor-parallel GPUs"
    )  # fmt: skip
    if sparse and not settings["as_is"]:
        few = "; fewer than 128 heads with their share of the MLP, as on a tensor-parallel GPU"
        model = (
            "layers of DeepSeek-V3.2 without experts, as many as a heading says, each with its "
            f"indexer (2048 tokens are read), KV cache dtype {settings['kv_cache_dtype']}"
            f"{few if min(settings['heads']) < 128 else ''}"
        )
    quantised = settings.get("kv_cache_dtype", "auto")
    if not sparse and quantised != "auto":
        model = f"{model}; KV cache dtype {quantised}"
    graphs = "no CUDA graphs" if settings["eager"] else "CUDA graphs of whole decode steps"
    lines = [
        f"Random weights: {model}. {settings['dtype']}, {graphs}, "
        f"{'torch.compile' if settings['compile'] else 'no torch.compile'}. A cache filled with "
        "random values by vLLM's DecodeBenchConnector; every request has blocks of its own. "
        "`step`: median of wall times from step to step, scheduling and sampling included, of a "
        "few rounds, the engines in turns; the lowest one. `GPU`: when any kernel of a step runs, "
        "by torch's profiler; `attn`: when only attention over the cache does, plan and merge "
        f"included{' and the indexer' * sparse}. Milliseconds. `best peer / ours` above 1: ours is "
        "faster. Where a step takes longer than the GPU works, the host decides.",
        "",
    ]
    if FP8_QUERY in report.backends:
        lines += [
            "`fp8 queries`: MLA_BACKEND_FP8_QUERY=1, so that queries and softmax weights are "
            "rounded to e4m3, as FLASHMLA's are with such a cache; TRITON_MLA's are not.",
            "",
        ]
    for heads in dict.fromkeys(row["heads"] for row in report.rows if "batch" in row):
        depth = deepest(report, heads)
        lines += [f"## {heads} heads, {depth} layers", ""] if not settings["as_is"] else []
        lines += _steps_table(report, heads)
    return lines + _disturbed(report)


def _disturbed(report: Report) -> list[str]:
    """How often the rounds of a case differ."""
    counts: dict[str, list[bool]] = {}
    for row in report.rows:
        if rounds := row.get("rounds_ms"):
            differs = max(rounds) > 1.1 * min(rounds)
            counts.setdefault(row["backend"], []).append(differs)
    said = [f"{label(name)} {sum(seen)} of {len(seen)}" for name, seen in counts.items()]
    if not said:
        return []
    line = "Cases whose rounds differ by more than 10%, which is the host's doing: "
    return [f"{line}{', '.join(said)}.", ""]


def deepest(report: Report, heads: int) -> int:
    """Layers of most cases; those of a large cache have fewer."""
    layers = [row.get("layers", 0) for row in report.rows if row.get("heads") == heads]
    return max(layers, default=0)


def step_groups(report: Report, heads: int) -> dict[tuple[int, int], dict[str, Row]]:
    groups: dict[tuple[int, int], dict[str, Row]] = {}
    for row in report.rows:
        if row.get("heads") == heads and "step_ms" in row:
            groups.setdefault((row["batch"], row["context"]), {})[row["backend"]] = row
    return dict(sorted(groups.items(), key=lambda item: item[0][::-1]))


def ratio(rows: dict[str, Row], key: str, ours: str = OURS) -> float | None:
    """The best peer's `key` over that of `ours`."""
    peers = [row[key] for name, row in rows.items() if name not in LABELS and row.get(key)]
    mine = rows.get(ours, {}).get(key)
    return min(peers) / mine if peers and mine else None


def _steps_table(report: Report, heads: int) -> list[str]:
    groups = step_groups(report, heads)
    names = [name for name in report.backends if any(name in rows for rows in groups.values())]
    head = ["b x context", *(f"{label(name)}: step, GPU, attn" for name in names)]
    head += ["best peer / ours: step", "GPU", "attn", "attention in our step"]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for (batch, context), rows in groups.items():
        layers = min(row.get("layers", 0) for row in rows.values())
        fewer = layers < deepest(report, heads) and not report.settings["as_is"]
        cells = [f"{batch} x {context}" + f" ({layers} layer{'s' * (layers > 1)})" * fewer]
        for name in names:
            row = rows.get(name, {})
            cells.append(
                ", ".join(_number(row.get(k), 3) for k in ("step_ms", "gpu_ms", "attention_ms"))
            )
        cells += [_number(ratio(rows, key), 2) for key in MEANS]
        share = rows.get(OURS, {}).get("attention_share")
        cells.append(f"{share:.0%}" if share is not None else "")
        lines.append("| " + " | ".join(cells) + " |")
    for ours, words in ((OURS, "ours"), (FP8_QUERY, "ours with fp8 queries")):
        for key, what in MEANS.items():
            found = [value for rows in groups.values() if (value := ratio(rows, key, ours))]
            if found:
                won = sum(value >= 1 for value in found)
                line = f"{what}, best peer / {words}: geometric mean {mean_of(found):.3f}"
                lines += ["", f"{line}, at least as fast in {won} of {len(found)} cases."]
    return [*lines, ""]


def mean_of(ratios: list[float]) -> float:
    """The geometric mean."""
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def serve_lines(report: Report) -> list[str]:
    settings = report.settings
    model = f"the shapes in configs/models/{settings['model']}"
    layers = settings["layers"]
    layers = layers[0] if isinstance(layers, list) else layers  # a number in older results
    if not settings["as_is"]:
        heads = settings["heads"][0]
        model = f"{layers} dense layers of DeepSeek-V3's width, {heads} heads"
        if heads < RELEASED_HEADS:
            ranks = RELEASED_HEADS // heads
            model += f" and 1 / {ranks} of the MLP, as on one of {ranks} tensor-parallel GPUs"
    together = (
        "all servers hold their share of the GPU's memory from the start and are loaded one at a "
        "time, so while one is measured the others do nothing; "
    )
    few_layers = (
        " So few layers make steps of a few milliseconds: with many clients the HTTP server and "
        "the load generator, which are Python, take as long as the GPU."
    )
    lines = [
        f"Random weights of {model}; the vocabulary is the tokenizer's, the demo models' of 2048 "
        f"where {settings['model']} has none. {settings['dtype']}, "
        f"{'torch.compile' if settings['compile'] else 'no torch.compile'}, "
        f"{'no CUDA graphs' if settings['eager'] else 'CUDA graphs of decode steps'}, no prefix "
        "caching; vLLM's server with the same options for every backend, "
        f"{together if settings['together'] else ''}loaded by `vllm bench serve` with random "
        "prompts, the same for every backend, at temperature 1. "
        f"Closed loops: {settings['rounds']} requests a client, {FEWEST} in all at least. "
        f"Open loops: {settings['open_requests']} requests, Poisson arrivals. "
        f"Goodput: requests a second within {settings['slo']}, in milliseconds. "
        "Prefill is vLLM's own in every row."
        f"{few_layers if not settings['as_is'] and layers < FEW_LAYERS else ''}",
        *(["", "A reduced list of loads, for want of time on the machine."] * settings["reduced"]),
        "",
        "| backend | same greedy tokens as the first | ready after s |",
        "|---|--:|--:|",
    ]
    for row in report.rows:
        if "start_s" in row:
            same = f"{row['same_tokens_as_first']:.1%}"
            lines.append(f"| {label(row['backend'])} | {same} | {row['start_s']:.0f} |")
    lines.append("")
    for row in report.rows:
        if "gpu_memory_gib" in row:
            gib = f"{row['gpu_memory_gib']:.1f} GiB"
            lines += [f"* GPU memory of {label(row['backend'])} at the end: {gib}"]
    heads = [f"{m.upper()} {s}" for m in METRICS for s in STATISTICS]
    lines += ["", "| shape | load | backend | output tok/s | goodput | " + " | ".join(heads) + " |"]
    lines.append("|---|---|---|--:|--:|" + "--:|" * len(heads))
    for row in sorted(serve_rows(report), key=load_key):
        _, kind, size = load_key(row)
        load = f"{size:g} clients" if kind == "closed" else f"{size:g} a second"
        cells = [row["shape"], load, label(row["backend"]), f"{row['output_tok_s']:.0f}"]
        cells.append(_number(row.get("goodput_s"), 2))
        cells += [f"{row[f'{m}_{s}']:.1f}" for m in METRICS for s in STATISTICS]
        lines.append("| " + " | ".join(cells) + " |")
    return [*lines, "", "Times in milliseconds.", "", *_serve_ratios(report)]


def _serve_ratios(report: Report) -> list[str]:
    """Ours over each peer, load by load."""
    groups: dict[tuple[Shape, str, float], dict[str, Row]] = {}
    for row in serve_rows(report):
        groups.setdefault(load_key(row), {})[row["backend"]] = row
    peers = [name for name in report.backends if name not in LABELS]
    if not any(OURS in rows and len(rows) > 1 for rows in groups.values()):
        return []
    best = []
    lines = [
        "Ours beside each peer: our output tokens a second over its, its median ITL over ours. "
        "Above 1, ours is better.",
        "",
        "| shape | load | " + " | ".join(f"{label(p)}: tok/s, ITL" for p in peers) + " |",
        "|---|---|" + "--:|" * len(peers),
    ]
    for (shape, kind, size), rows in sorted(groups.items()):
        cells = [str(shape), f"{size:g} clients" if kind == "closed" else f"{size:g} a second"]
        speeds: list[float] = []
        for peer in peers:
            if OURS not in rows or peer not in rows:
                cells.append("")
                continue
            speed = rows[OURS]["output_tok_s"] / rows[peer]["output_tok_s"]
            speeds.append(speed)
            cells.append(f"{speed:.2f}, {rows[peer]['itl_p50'] / rows[OURS]['itl_p50']:.2f}")
        best += [min(speeds)] if speeds else []
        lines.append("| " + " | ".join(cells) + " |")
    won = sum(speed >= 1 for speed in best)
    line = f"Output tokens a second, ours over the best peer's: geometric mean {mean_of(best):.3f}"
    return [*lines, "", f"{line}, at least as many in {won} of {len(best)} loads."]


def serve_rows(report: Report) -> list[Row]:
    return [row for row in report.rows if "output_tok_s" in row]


def load_key(row: Row) -> tuple[Shape, str, float]:
    return Shape.parse(row["shape"]), row["loop"], row.get("concurrency") or row.get("rate") or 0


def plot_serve(report: Report, path: Path) -> None:
    """Throughput of the GPU against tokens a second that one user sees, a panel per shape."""
    import matplotlib.pyplot as plt

    rows = [row for row in serve_rows(report) if row["loop"] == "closed"]
    shapes = list(dict.fromkeys(row["shape"] for row in rows))
    figure, panels = plt.subplots(
        1, max(len(shapes), 1), figsize=(5 * max(len(shapes), 1), 4), squeeze=False
    )
    for axes, shape in zip(panels[0], shapes, strict=False):
        for backend in report.backends:
            line = [r for r in rows if r["shape"] == shape and r["backend"] == backend]
            line.sort(key=lambda row: row["concurrency"])
            users = [1e3 / row["tpot_p50"] for row in line]
            colour = COLOURS.get(backend, "tab:gray")
            axes.plot(users, [r["output_tok_s"] for r in line], marker="o", color=colour,
                      label=label(backend))  # fmt: skip
        axes.set(title=shape, xlabel="tokens a second and user", ylabel="output tokens a second")
        axes.grid(alpha=0.3)
        axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def plot_steps(report: Report, path: Path) -> None:
    """Step time of the best peer over ours against the context, a line per batch."""
    import matplotlib.pyplot as plt

    heads_list = list(dict.fromkeys(row["heads"] for row in report.rows if "batch" in row)) or [0]
    figure, panels = plt.subplots(
        1, len(heads_list), figsize=(6 * len(heads_list), 4), squeeze=False
    )
    for axes, heads in zip(panels[0], heads_list, strict=True):
        lines: dict[int, list[tuple[int, float]]] = {}
        for (batch, context), rows in step_groups(report, heads).items():
            value = ratio(rows, "step_ms")
            if value:
                lines.setdefault(batch, []).append((context, value))
        for batch, points in sorted(lines.items()):
            axes.plot(*zip(*sorted(points), strict=True), marker="o", label=f"batch {batch}")
        axes.axhline(1, color="black", linewidth=1)
        axes.set(xscale="log", title=f"{heads} heads", xlabel="context",
                 ylabel="step of the best peer / of ours")  # fmt: skip
        axes.grid(alpha=0.3)
        if lines:
            axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)
