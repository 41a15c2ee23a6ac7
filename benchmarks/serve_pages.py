# SPDX-License-Identifier: Apache-2.0
"""Loads of servers: the tables and the plot of `serve.py --mode serve`."""

import statistics
from pathlib import Path
from typing import Any

from cells import FEW_SAMPLES, TIME_HEADS, number, quotient, times
from serve_cases import (
    FEWEST,
    FP8_QUERY,
    LABELS,
    OURS,
    REDUCED,
    RELEASED_HEADS,
    Shape,
    label,
    width_of,
)
from serve_report import Report

Row = dict[str, Any]
FEW_LAYERS = 16  # below, a step takes no longer than its host needs with many clients
COLOURS = {
    OURS: "tab:red",
    FP8_QUERY: "tab:orange",
    "FLASHMLA": "tab:blue",
    "FLASH_ATTN_MLA": "tab:green",
}


def serve_lines(report: Report) -> list[str]:
    loads = median_runs(serve_rows(report))
    reduced = ["", "A reduced list of loads, for want of time on the machine."]
    lines = [_conditions(report, loads), *(reduced * report.settings["reduced"]), ""]
    lines += [*_gate_lines([row for row in report.rows if "start_s" in row]), ""]
    for row in report.rows:
        if "gpu_memory_gib" in row:
            gib = f"{row['gpu_memory_gib']:.1f} GiB"
            lines += [f"* GPU memory of {label(row['backend'])} at the end: {gib}"]
    lines += [_late_line(row) for row in report.rows if "compiled_in_loads" in row]
    lines += ["", *_load_lines(loads, report.backends), ""]
    return [*lines, f"Times in milliseconds. {FEW_SAMPLES}", "", *_serve_ratios(report)]


def _conditions(report: Report, loads: list[Row]) -> str:
    """Which model, servers and loads: the paragraph above the tables."""
    settings = report.settings
    layers = settings["layers"]
    layers = layers[0] if isinstance(layers, list) else layers  # a number in older results
    sparse = settings.get("family") == "v3.2"
    cache = settings.get("kv_cache_dtype", "auto")
    options = settings.get("server_options") or []
    caching, asked = "--enable-prefix-caching" in options, " ".join(options)
    together = (
        "all servers hold their share of the GPU's memory from the start and are loaded one at a "
        "time, so while one is measured the others do nothing; "
    )
    requests = f"{settings['open_requests']} requests, Poisson arrivals"
    open_loops = f"Open loops: {requests}{_at_once(settings, options)}. "
    which = "All loads" if all("spread" in row for row in loads) else "Those loads with brackets"
    repeated = (
        f"{which} were repeated{', another server first each time' * settings['together']}: "
        "shown is the run with the median of output tokens a second, in brackets the least and "
        "the most of all runs. "
    )
    goodput = f"Goodput: requests a second within {settings['slo']}, in milliseconds. "
    prefill = "Prefill is vLLM's own in every row. "
    few_layers = (
        "So few layers make steps of a few milliseconds: with many clients the HTTP server and "
        "the load generator, which are Python, take as long as the GPU."
    )
    words = (
        f"Random weights of {_model(settings, layers, sparse)}; the vocabulary is the tokenizer's, "
        f"the demo models' of 2048 where {settings['model']} has none. {settings['dtype']}, "
        f"{f'KV cache dtype {cache}, ' if cache != 'auto' else ''}"
        f"{'torch.compile' if settings['compile'] else 'no torch.compile'}, "
        f"{'no CUDA graphs' if settings['eager'] else 'CUDA graphs of decode steps'}, "
        f"{'' if caching else 'no '}prefix caching; vLLM's server with the same options for every "
        f"backend, {f'among them {asked}, ' if options else ''}"
        f"{together if settings['together'] else ''}loaded by `vllm bench serve` with random "
        "prompts, the same for every backend, at temperature 1. "
        f"Closed loops: {settings['rounds']} requests a client, {FEWEST} in all at least. "
        f"{open_loops if any(row.get('loop') == 'open' for row in report.rows) else ''}"
        f"{repeated if any('spread' in row for row in loads) else ''}"
        f"{goodput if settings['slo'] else ''}"
        f"{'' if sparse else prefill}"
        f"{few_layers if not settings['as_is'] and layers < FEW_LAYERS else ''}"
    )
    return words.rstrip()


def _at_once(settings: dict[str, Any], options: list[str]) -> str:
    """How many requests a server takes, where no option of its own says so; older results do not
    tell."""
    if any("--max-num-seqs" in option for option in options):
        return ""
    reduced = [load.concurrency or 0 for load in REDUCED]
    clients = max(reduced if settings["reduced"] else settings.get("concurrency", [0]))
    return f", of which up to {clients} run at once, as of the closed loops" if clients else ""


def _model(settings: dict[str, Any], layers: int, sparse: bool) -> str:
    if settings["as_is"]:
        return f"the shapes in configs/models/{settings['model']}"
    heads = settings["heads"][0]
    model = f"{layers} dense layers of {width_of(settings['model'])}, {heads} heads"
    if sparse:
        model = f"{layers} layers of DeepSeek-V3.2 without experts, each with its indexer (2048 "
        model += f"tokens are read), {heads} heads"
    if heads < RELEASED_HEADS:
        ranks = RELEASED_HEADS // heads
        model += f" and 1 / {ranks} of the MLP, as on one of {ranks} tensor-parallel GPUs"
    return model


def _late_line(row: Row) -> str:
    late = row["compiled_in_loads"]
    kernels = ", ".join(f"{name} ({count})" for name, count in sorted(late.items())) or "none"
    return f"* Kernels that {label(row['backend'])} made ready in its loads: {kernels}"


def _load_lines(loads: list[Row], backends: list[str]) -> list[str]:
    """The table of all loads."""
    lines = [f"| shape | load | backend | output tok/s | goodput | {' | '.join(TIME_HEADS)} |"]
    lines.append("|---|---|---|--:|--:|" + "--:|" * len(TIME_HEADS))
    for row in sorted(loads, key=lambda row: (load_key(row), backends.index(row["backend"]))):
        shape, kind, size = load_key(row)
        load = f"{size:g} clients" if kind == "closed" else f"{size:g} a second"
        cells = [row["shape"], load, label(row["backend"]), f"{row['output_tok_s']:.0f}"]
        cells[-1] += " ({:.0f} to {:.0f})".format(*row["spread"]) if "spread" in row else ""
        cells.append(number(row.get("goodput_s"), 2))
        cells += times(row, row["completed"], shape.output_len)
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _gate_lines(rows: list[Row]) -> list[str]:
    """What each server said beside the first; older results have a share of tokens."""
    nats = any("nats_from_first" in row for row in rows)
    head = "nats from the first, at most" if nats else "same greedy tokens as the first"
    lines = [f"| backend | {head} | ready after s |", "|---|--:|--:|"]
    for row in rows:
        if nats:
            said = row["nats_from_first"]
            alone = said is None or len(rows) == 1
            cell = "none to compare" if alone else f"{said:.3f}"
        else:
            cell = f"{row['same_tokens_as_first']:.1%}"
        lines.append(f"| {label(row['backend'])} | {cell} | {row['start_s']:.0f} |")
    return lines


def _serve_ratios(report: Report) -> list[str]:
    """Ours over each peer, load by load."""
    groups: dict[tuple[Shape, str, float], dict[str, Row]] = {}
    for row in median_runs(serve_rows(report)):
        groups.setdefault(load_key(row), {})[row["backend"]] = row
    peers = [name for name in report.backends if name not in LABELS]
    if not peers or not any(OURS in rows and len(rows) > 1 for rows in groups.values()):
        return []
    best = []
    lines = [
        "Ours beside each peer: our output tokens a second over its, its median TPOT over ours. "
        "Above 1, ours is better. (ITL is no measure here: with many clients the server sends "
        "several tokens at once.)",
        "",
        "| shape | load | " + " | ".join(f"{label(p)}: tok/s, TPOT" for p in peers) + " |",
        "|---|---|" + "--:|" * len(peers),
    ]
    for (shape, kind, size), rows in sorted(groups.items()):
        cells = [str(shape), f"{size:g} clients" if kind == "closed" else f"{size:g} a second"]
        speeds: list[float] = []
        for peer in peers:
            if OURS not in rows or peer not in rows:
                cells.append("")
                continue
            speed = quotient(rows[OURS]["output_tok_s"], rows[peer]["output_tok_s"])
            speeds += [speed] if speed else []
            token = quotient(rows[peer]["tpot_p50"], rows[OURS]["tpot_p50"])
            cells.append(f"{number(speed, 2)}, {number(token, 2)}")
        best += [min(speeds)] if speeds else []
        lines.append("| " + " | ".join(cells) + " |")
    if not best:
        return lines
    won = sum(speed >= 1 for speed in best)
    mean = statistics.geometric_mean(best)
    line = f"Output tokens a second, ours over the best peer's: geometric mean {mean:.3f}"
    return [*lines, "", f"{line}, at least as many in {won} of {len(best)} loads."]


def serve_rows(report: Report) -> list[Row]:
    return [row for row in report.rows if "output_tok_s" in row]


def median_runs(rows: list[Row]) -> list[Row]:
    """Of a backend's runs of one load the one with the median throughput (of an even number the
    slower one in the middle), with the least and the most as its `spread`."""
    runs: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        runs.setdefault((row["backend"], *load_key(row)), []).append(row)
    result = []
    for repetitions in runs.values():
        repetitions.sort(key=lambda row: row["output_tok_s"])
        row = repetitions[(len(repetitions) - 1) // 2]
        speeds = [repetitions[0]["output_tok_s"], repetitions[-1]["output_tok_s"]]
        result.append(row | ({"spread": speeds} if len(repetitions) > 1 else {}))
    return result


def load_key(row: Row) -> tuple[Shape, str, float]:
    return Shape.parse(row["shape"]), row["loop"], row.get("concurrency") or row.get("rate") or 0


def plot_serve(report: Report, path: Path) -> None:
    """Throughput of the GPU against tokens a second that one user sees, a panel per shape."""
    import matplotlib.pyplot as plt

    rows = [row for row in median_runs(serve_rows(report)) if row["loop"] == "closed"]
    shapes = list(dict.fromkeys(row["shape"] for row in rows))
    figure, panels = plt.subplots(
        1, max(len(shapes), 1), figsize=(5 * max(len(shapes), 1), 4), squeeze=False
    )
    for axes, shape in zip(panels[0], shapes, strict=False):
        for backend in report.backends:
            line = [r for r in rows if r["shape"] == shape and r["backend"] == backend]
            line.sort(key=lambda row: row["concurrency"])
            line = [row for row in line if row["tpot_p50"]]  # answers of one token have none
            users = [1e3 / row["tpot_p50"] for row in line]
            colour = COLOURS.get(backend, "tab:gray")
            axes.plot(users, [r["output_tok_s"] for r in line], marker="o", color=colour,
                      label=label(backend))  # fmt: skip
        axes.set(title=shape, xlabel="tokens a second and user", ylabel="output tokens a second")
        axes.grid(alpha=0.3)
        axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)  # pages are written again with each row
