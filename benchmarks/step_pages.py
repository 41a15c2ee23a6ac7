# SPDX-License-Identifier: Apache-2.0
"""Decode steps in engines: the tables and the plot of `serve.py --mode steps`."""

import statistics
from pathlib import Path
from typing import Any

from cells import number
from serve_cases import FP8_QUERY, LABELS, OURS, label, width_of
from serve_report import Report

Row = dict[str, Any]
MEANS = {"step_ms": "Whole steps", "gpu_ms": "GPU", "attention_ms": "Attention"}


def steps_lines(report: Report) -> list[str]:
    settings = report.settings
    sparse = settings.get("family") == "v3.2"
    model = settings["model"] if settings["as_is"] else _dense(settings)
    if sparse and not settings["as_is"]:
        few = "; fewer than 128 heads with their share of the MLP, as on a tensor-parallel GPU"
        model = (
            "layers of DeepSeek-V3.2 without experts, as many as a heading says, each with its "
            f"indexer (2048 tokens are read), KV cache dtype {settings['kv_cache_dtype']}"
            f"{few if min(settings['heads']) < 128 else ''}"
        )
    quantised = settings.get("kv_cache_dtype", "auto")
    if quantised != "auto" and (settings["as_is"] or not sparse):
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
    return lines + _gate(report) + _steps_counted(report) + _disturbed(report)


def _dense(settings: dict[str, Any]) -> str:
    """Which layers of DeepSeek-V3, or another model, these are."""
    heads = settings.get("heads", [128, 16])
    width = f"dense layers of {width_of(settings['model'])}, as many as a heading says, "
    if set(heads) == {128, 16}:
        return width + (
            "128 heads, or 16 with an eighth of the MLP as on one of 8 tensor-parallel GPUs"
        )
    few = "; fewer than 128 with their share of the MLP, as on a tensor-parallel GPU"
    counts = " and ".join(map(str, heads))
    return f"{width}{counts} heads{few if min(heads) < 128 else ''}"


def _gate(report: Report) -> list[str]:
    """How far apart the engines were, over all of their depths; older results do not say."""
    apart: dict[str, list[float | None]] = {}
    for row in report.rows:
        if "nats_from_first" in row:
            apart.setdefault(row["backend"], []).append(row["nats_from_first"])
    said = [
        f"{label(name)} {'none to compare' if None in nats else f'{max(nats):.3f}'}"
        for name, nats in apart.items()
    ]
    if not said:
        return []
    line = (
        "Before the steps each engine answered prompts; nats from the first one's logprobs, at most"
    )
    return [f"{line}: {', '.join(said)}.", ""]


def _steps_counted(report: Report) -> list[str]:
    """Of how many steps a time is the median: `--case-seconds` allows fewer than `--steps`."""
    counts: dict[str, list[int]] = {}
    for row in report.rows:
        if "steps" in row:
            counts.setdefault(row["backend"], []).append(row["steps"])
    said = [
        f"{label(name)} {min(seen)}" + f" to {max(seen)}" * (min(seen) < max(seen))
        for name, seen in counts.items()
    ]
    return [f"Steps in the round that is shown: {', '.join(said)}.", ""] if said else []


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
                ", ".join(number(row.get(k), 3) for k in ("step_ms", "gpu_ms", "attention_ms"))
            )
        cells += [number(ratio(rows, key), 2) for key in MEANS]
        share = rows.get(OURS, {}).get("attention_share")
        cells.append(f"{share:.0%}" if share is not None else "")
        lines.append("| " + " | ".join(cells) + " |")
    for ours, words in ((OURS, "ours"), (FP8_QUERY, "ours with fp8 queries")):
        for key, what in MEANS.items():
            found = [value for rows in groups.values() if (value := ratio(rows, key, ours))]
            if found:
                won = sum(value >= 1 for value in found)
                mean = statistics.geometric_mean(found)
                line = f"{what}, best peer / {words}: geometric mean {mean:.3f}"
                lines += ["", f"{line}, at least as fast in {won} of {len(found)} cases."]
    return [*lines, *_slower(groups), ""]


def _slower(groups: dict[tuple[int, int], dict[str, Row]]) -> list[str]:
    """The cases whose steps take longer than the best peer's, and whether the GPU works longer."""
    said = []
    for (batch, context), rows in groups.items():
        if (ratio(rows, "step_ms") or 1) < 1:
            gpu, rounds = ratio(rows, "gpu_ms"), rows[OURS].get("rounds_ms", [])
            spread = f", our rounds {min(rounds):.2f} to {max(rounds):.2f} ms" if rounds else ""
            said.append(f"{batch} x {context} (GPU {number(gpu, 2) or 'not measured'}{spread})")
    return ["", f"Steps slower than the best peer's: {'; '.join(said)}."] if said else []


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
    plt.close(figure)  # pages are written again with each row
