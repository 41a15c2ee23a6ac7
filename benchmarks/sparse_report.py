# SPDX-License-Identifier: Apache-2.0
"""The sparse results as JSON and as one Markdown page with those of the indexer and top-k."""

import json
import re
import statistics
from pathlib import Path
from typing import Any

import torch
from mla_kernels.sparse.choice import is_few
from outputs import write, write_json
from sparse_cases import PADDINGS

HOPPER, PORTABLE = "mla_kernels/hopper", "mla_kernels/triton"
DETERMINISTIC, DROP_IN = "mla_kernels/deterministic", "mla_kernels/flash_mla_sparse_fwd"
PEER = "peer/"
FLASH_ATTENTION = "peer/fa3"
NAMES = {HOPPER: "Hopper", PORTABLE: "portable", DETERMINISTIC: "deterministic"}
PADDED = tuple(f"_{padding}" for padding in PADDINGS if padding)
AGAIN = ("_ascending", "_runs")  # cases that the mean has in random order already

INDEXER_UNITS = "Microseconds: medians of CUDA-graph replays, cold L2."  # else said above it

Cases = dict[str, dict[str, dict[str, Any]]]


def write_report(report: dict[str, Any], folder: Path, ending: str = "") -> None:
    """sparse.json in `folder`, and sparse.md anew; with an ending `ending` behind the names, and
    then the page is of these rows alone."""
    write_json(folder / f"sparse{ending}.json", report)
    if ending:
        write(folder / f"sparse{ending}.md", markdown(report, None))
    else:
        _write_page(folder)


def write_indexer_report(report: dict[str, Any], folder: Path, ending: str = "") -> None:
    """As write_report, of sparse_indexer.json; with an ending its page has that name, too."""
    write_json(folder / f"sparse_indexer{ending}.json", report)
    if ending:
        write(folder / f"sparse_indexer{ending}.md", markdown(None, report))
    else:
        _write_page(folder)


def _write_page(folder: Path) -> None:
    """sparse.md, of sparse.json and sparse_indexer.json: of both, or of the one that is there."""
    attention, indexer = (
        json.loads(path.read_text()) if path.exists() else None
        for path in (folder / f"{stem}.json" for stem in ("sparse", "sparse_indexer"))
    )
    write(folder / "sparse.md", markdown(attention, indexer))


def by_case(rows: list[dict[str, Any]], op: str) -> Cases:
    cases: Cases = {}
    for row in rows:
        if row["op"] == op:
            cases.setdefault(row["case"], {})[row["impl"]] = row
    return cases


def markdown(report: dict[str, Any] | None, indexer: dict[str, Any] | None) -> str:
    """Microseconds, one case a line; losses stand beside wins. report: of the attention."""
    lines = ["# Sparse MLA on a GPU"]
    if report:
        lines += ["", *attention_section(report)]
    if indexer:
        lines += ["", "## Indexer scores and exact top-k", "", *source(indexer)]
        lines += [INDEXER_UNITS] * (report is None)
        for op in dict.fromkeys(row["op"] for row in indexer["rows"]):
            lines += ["", f"### {op}", "", *plain_table(by_case(indexer["rows"], op))]
            lines += not_timed([row for row in indexer["rows"] if row["op"] == op])
    return "\n".join(lines) + "\n"


def attention_section(report: dict[str, Any]) -> list[str]:
    lines = [
        *source(report),
        "Microseconds: medians of CUDA-graph replays, cold L2. `floor`: the larger of FLOP over",
        "the GEMM rate and bytes over the read rate, both of this run. 2048 slots a token, in",
        "random order; with `ascending` sorted, with `runs` in runs of 16 neighbours. FlashMLA",
        "takes 64 or 128 heads: fewer are padded before it is timed. Above 1 ours is faster, as",
        '`impl="auto"` takes it (`auto`): the Hopper kernel; where heads or tokens are few',
        "(`is_few`, mla_kernels/sparse/choice.py) or the cache has one scale (`fp8`) the portable",
        "one. The mean is of random orders. `deterministic`: with `deterministic=True`. `drop-in`:",
        "the prefill of `mla_kernels.flash_mla`, which gives the largest logits too, as FlashMLA's",
        "does.",
    ]
    if any(row["impl"] == FLASH_ATTENTION for row in report["rows"]):
        lines += ["`FA3`: FlashAttention-3 over pages of one row; the better peer counts."]
    for op, title in (("decode", "Decode"), ("prefill", "Prefill of 4096 tokens")):
        cases = by_case(report["rows"], op)
        cases = {case: rows for case, rows in cases.items() if not case.endswith(PADDED)}
        if cases:
            lines += ["", f"## {title}", "", *attention_table(cases)]
    lines += padding_section(by_case(report["rows"], "decode"))
    return lines + not_timed(report["rows"])


def not_timed(rows: list[dict[str, Any]]) -> list[str]:
    failed = [row for row in rows if "failed" in row]
    listed = [f"* {row['case']} {row['impl']}: {row['failed']}" for row in failed]
    return ["", "Not timed:", "", *listed] if failed else []


def source(report: dict[str, Any]) -> list[str]:
    machine = ", ".join(f"{k} {v}" for k, v in report["machine"].items())
    note = [report["note"], ""] if "note" in report else []
    return [f"{machine}.", "", f"`{report['command']}`", "", *note]


def taken(case: str) -> str:
    """The implementation that "auto" takes for a case, by its name."""
    found = re.match(r"(?:b(\d+)|prefill)_h(\d+)_q(\d+)", case)
    assert found, case
    batch, heads, s_q = (int(number or 1) for number in found.groups())
    if "_fp8_ds_mla" not in case and "_fp8" in case:
        return PORTABLE
    cache = torch.uint8 if "fp8_ds_mla" in case else torch.bfloat16
    return PORTABLE if is_few(batch * s_q, heads, cache) else HOPPER


def attention_table(cases: Cases) -> list[str]:
    """The better peer beside ours; FlashAttention-3's column stands where it ran."""
    beside = any(FLASH_ATTENTION in rows for rows in cases.values())
    peers = "FlashMLA | FA3 | best peer / auto" if beside else "FlashMLA | FlashMLA / auto"
    lines = [
        "| case | floor | Hopper | portable | deterministic | drop-in | auto "
        f"| {peers} | TFLOPS | GB/s |",
        "|---" * (11 + beside) + "|",
    ]
    ratios: dict[str, list[float]] = {}  # by the rows' format
    for case, rows in cases.items():
        mine = rows.get(taken(case), {})
        theirs = {impl: row for impl, row in rows.items() if impl.startswith(PEER)}
        fa3 = theirs.pop(FLASH_ATTENTION, {})
        flashmla = next(iter(theirs.values()), {})
        times = [row["us"] for row in (flashmla, fa3) if "us" in row]
        ratio = ""
        if "us" in mine and times:
            ratio = f"{min(times) / mine['us']:.2f}"
            if not case.endswith(AGAIN):
                ratios.setdefault(rows_of(case), []).append(min(times) / mine["us"])
        cells = [case, next(iter(rows.values()))["floor_us"]]
        cells += [us(rows.get(impl, {})) for impl in (HOPPER, PORTABLE, DETERMINISTIC, DROP_IN)]
        cells += [NAMES[taken(case)] if mine else "", us(flashmla), *([us(fa3)] * beside), ratio]
        cells += [mine.get("tflops", ""), mine.get("gbps", "")]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    if ratios:
        lines += ["", mean_of([r for some in ratios.values() for r in some]).capitalize()]
    if len(ratios) > 1:
        lines += ["", *(f"Of {rows} rows: {mean_of(some)}" for rows, some in ratios.items())]
    return lines


def rows_of(case: str) -> str:
    """The format of a case's cache rows."""
    return next(name for name in ("fp8_ds_mla", "fp8", "bf16") if f"_{name}" in case)


def mean_of(ratios: list[float]) -> str:
    won = sum(r >= 1 for r in ratios)
    mean = statistics.geometric_mean(ratios)
    return f"geometric mean {mean:.2f}; at least as fast in {won} of {len(ratios)}."


def padding_section(cases: Cases) -> list[str]:
    """Cases with empty slots beside the same ones without, an implementation a line."""
    bases = dict.fromkeys(
        case.removesuffix(suffix) for case in cases for suffix in PADDED if case.endswith(suffix)
    )
    if not bases:
        return []
    lines = [
        "",
        "## What empty slots cost",
        "",
        "In brackets: of the time with 2048 slots that all name a row. `half at the end` and",
        "`half scattered`: 1024 of the 2048 are -1. If that cost nothing they would take as long",
        "as `1024 slots`, without padding; if -1 cost as much as a row, 1.00. `lengths 128`: 2048",
        "slots of which the first 128 count; the others name rows too. `128 slots`: no padding.",
        "",
        "| case | implementation | 2048 slots | half at the end | half scattered | 1024 slots "
        "| lengths 128 | 128 slots |",
        "|---" * (2 + len(PADDINGS)) + "|",
    ]
    for base in bases:
        found = {p: cases.get(f"{base}_{p}" if p else base, {}) for p in PADDINGS}
        for impl in dict.fromkeys(impl for rows in found.values() for impl in rows):
            whole = found[""].get(impl, {})
            cells = [share(rows.get(impl, {}), whole) for rows in found.values()]
            name = NAMES.get(impl, impl.removeprefix(PEER))
            lines.append("| " + " | ".join([base, name, us(whole), *cells[1:]]) + " |")
    return lines


def share(row: dict[str, Any], whole: dict[str, Any]) -> str:
    """Microseconds, and the share of those of `whole`."""
    if "us" not in row or "us" not in whole:
        return us(row)
    return f"{us(row)} ({row['us'] / whole['us']:.2f})"


def plain_table(cases: Cases) -> list[str]:
    impls = list(dict.fromkeys(impl for rows in cases.values() for impl in rows))
    lines = ["| case | " + " | ".join(impls) + " |", "|---" * (len(impls) + 1) + "|"]
    for case, rows in cases.items():
        lines.append("| " + " | ".join([case, *(us(rows.get(impl, {})) for impl in impls)]) + " |")
    return lines


def us(row: dict[str, Any]) -> str:
    if not row:
        return ""
    return f"{row['us']:.1f}" if "us" in row else "failed"
