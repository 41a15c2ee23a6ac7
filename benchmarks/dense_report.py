# SPDX-License-Identifier: Apache-2.0
"""The dense decode results as JSON, a Markdown table and a roofline plot."""

import statistics
from pathlib import Path
from typing import Any

from dense_cases import SHAPES
from dense_modes import MODES
from outputs import write, write_json

OURS = ("mla_kernels/hopper/pow2", "mla_kernels/triton/pow2")
# What a caller gets, so not always the same kernel with another rescale in it.
KERNELS = [
    "`amla` and `flash` are what `rescale=` gives, which may be another kernel: Hopper's own one",
    "for fp8 caches knows pow2 alone, and so do, on sm_90, the portable ones for more than 16 rows",
    "(heads times new tokens) of bf16 and for few rows of fp8. One kernel's rescales stand side by",
    "side in the Hopper columns of bf16 caches, and in the portable ones up to 16 rows of bf16.",
]
TITLES = {
    "cold": "# Dense MLA decode",
    "paused": "# Dense MLA decode after a pause",
    "sustained": "# Dense MLA decode under sustained load",
}
FAST_PEERS = ("peer/flashmla", "peer/fa3")
FP8 = ("mla_kernels/hopper/fp8_query", "peer/flashmla_fp8")


def stem(mode: str) -> str:
    """The name of a mode's files."""
    return "dense_decode" if mode == "cold" else f"dense_{mode}"


def write_report(report: dict[str, Any], folder: Path, ending: str = "") -> None:
    """dense_decode.json, .md and .png in `folder`; of another mode than cold dense_<mode>, with an
    ending `ending` behind the name, and then no picture. One that cannot be drawn is taken away:
    what is there is of other rows."""
    name = f"{stem(report['mode'])}{ending}"
    write_json(folder / f"{name}.json", report)
    write(folder / f"{name}.md", markdown(report))
    if name == stem("cold"):
        plot(report, folder / f"{name}.png")


def by_case(report: dict[str, Any]) -> dict[str, dict[str, dict[str, Any]]]:
    cases: dict[str, dict[str, dict[str, Any]]] = {}
    for row in report["rows"]:
        cases.setdefault(row["case"], {})[row["impl"]] = row
    return cases


def markdown(report: dict[str, Any]) -> str:
    """Microseconds, one case a line, then rates and ratios; losses stand beside wins."""
    cases = by_case(report)
    impls = list(dict.fromkeys(row["impl"] for row in report["rows"]))
    machine = ", ".join(f"{k} {v}" for k, v in report["machine"].items())
    lines = [
        TITLES[report["mode"]],
        "",
        f"{machine}.",
        "",
        f"`{report['command']}`",
        "",
        *([report["note"], ""] if "note" in report else []),
        f"Microseconds: {MODES[report['mode']].note}.",
        "`floor`: the larger of FLOP over the GEMM rate and bytes over the read rate, both of this",
        "run. `best peer`: the faster of FlashMLA and FlashAttention-3; above 1 ours is faster.",
        *(KERNELS if any("amla" in impl for impl in impls) else []),
        "",
        "| case | floor | " + " | ".join(i.removeprefix("mla_kernels/") for i in impls)
        + " | hopper: best peer | triton: vLLM Triton | hopper TFLOPS | hopper GB/s |",
        "|---" * (len(impls) + 6) + "|",
    ]  # fmt: skip
    wins: list[float] = []
    beside_all: list[float] = []
    for case, rows in cases.items():
        cells = [case, str(next(iter(rows.values()))["floor_us"])]
        cells += [_us(rows.get(impl)) for impl in impls]
        peers = [rows[p]["us"] for p in FAST_PEERS if "us" in rows.get(p, {})]
        best_peer = min(peers, default=None)
        hopper, triton = (rows.get(name, {}).get("us") for name in OURS)
        cells.append(_ratio(best_peer, hopper))
        cells.append(_ratio(rows.get("peer/vllm_triton", {}).get("us"), triton))
        cells += [str(rows.get(OURS[0], {}).get(key, "")) for key in ("tflops", "gbps")]
        lines.append("| " + " | ".join(cells) + " |")
        if best_peer and hopper:
            wins.append(best_peer / hopper)
            beside_all += wins[-1:] * (len(peers) == len(FAST_PEERS))
    if wins:
        mean = statistics.geometric_mean(wins)
        won = sum(w >= 1 for w in wins)
        lines += ["", f"Hopper kernel against the better peer: geometric mean {mean:.3f}, at least "
                  f"as fast in {won} of {len(wins)} cases."]  # fmt: skip
        if 0 < len(beside_all) < len(wins):
            mean = statistics.geometric_mean(beside_all)
            lines[-1] += f" Of the {len(beside_all)} in which both peers are: {mean:.3f}."
    lines += fp8_queries(cases)
    lines += energy(report, cases, impls)
    lines += zeroed(report["rows"])
    failed = [row for row in report["rows"] if "failed" in row]
    if failed:
        lines += ["", "Not timed:", ""]
        lines += [f"* {row['case']} {row['impl']}: {row['failed']}" for row in failed]
    return "\n".join(lines) + "\n"


def zeroed(rows: list[dict[str, Any]]) -> list[str]:
    """What was given other caches than the rest of its case; nothing if there was none."""
    found = [row for row in rows if row.get("tails") == "zeros" and "us" in row]
    lines = [
        "",
        "Behind a request's end the rows of its last block are NaN: they are none of its own. With",
        "these the results of a peer below are not finite, so that it was checked and timed over",
        "zeros there.",
        "",
        *(f"* {row['case']} {row['impl']}" for row in found),
    ]
    return lines if found else []


def fp8_queries(cases: dict[str, dict[str, dict[str, Any]]]) -> list[str]:
    """Ours beside FlashMLA's where both multiply in fp8; nothing if neither was there."""
    found = {case: [rows.get(impl, {}) for impl in FP8] for case, rows in cases.items()}
    found = {case: both for case, both in found.items() if any("us" in row for row in both)}
    if not found:
        return []
    lines = [
        "",
        "## fp8 queries",
        "",
        "q and the softmax weights in e4m3, both products in fp8. `error`: relative, in the",
        "Frobenius norm, against the definition with q as it was before it was rounded. The floor",
        "above is that of bf16 products.",
        "",
        "| case | hopper/fp8_query | FlashMLA fp8 | FlashMLA : ours | error | FlashMLA's |",
        "|---" * 6 + "|",
    ]
    wins = []
    for case, (mine, peer) in found.items():
        ratio = _ratio(peer.get("us"), mine.get("us"))
        errors = [str(row.get("rel_err", "")) for row in (mine, peer)]
        cells = [_us(row or None) for row in (mine, peer)]
        lines.append("| " + " | ".join([case, *cells, ratio, *errors]) + " |")
        if ratio:
            wins.append(peer["us"] / mine["us"])
    if wins:
        mean = statistics.geometric_mean(wins)
        won = sum(win >= 1 for win in wins)
        lines += ["", f"Geometric mean {mean:.3f}, at least as fast in {won} of {len(wins)} cases."]
    return lines


def energy(
    report: dict[str, Any], cases: dict[str, dict[str, dict[str, Any]]], impls: list[str]
) -> list[str]:
    """Joules a step, mean power and clock of a sustained run; nothing for the other modes."""
    if "roofs" not in report:
        return []
    roofs = ", ".join(f"{key} {value}" for key, value in report["roofs"].items())
    lines = ["", "## Under load", "", f"Roofs, sustained in this run (`floor` uses them): {roofs}."]
    if not any("joule_per_step" in row for row in report["rows"]):
        return [*lines, "NVML was not there: no energy."]
    lines += [
        "",
        "Joules a step (watts, SM MHz), from NVML's energy counter.",
        "",
        "| case | " + " | ".join(impl.removeprefix("mla_kernels/") for impl in impls) + " |",
        "|---" * (len(impls) + 1) + "|",
    ]
    for case, rows in cases.items():
        cells = [case]
        for row in (rows.get(impl, {}) for impl in impls):
            known = "joule_per_step" in row
            cells.append(
                f"{row['joule_per_step']:.3f} ({row['watts']:.0f}, {row['sm_mhz']})"
                if known
                else ""
            )
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _us(row: dict[str, Any] | None) -> str:
    if row is None:
        return ""
    return f"{row['us']:.1f}" if "us" in row else "failed"


def _ratio(theirs: float | None, ours: float | None) -> str:
    return f"{theirs / ours:.2f}" if theirs and ours else ""


def plot(report: dict[str, Any], path: Path) -> None:
    """TFLOPS over arithmetic intensity, under the roofs of this run."""
    try:
        import matplotlib
    except ImportError:
        path.unlink(missing_ok=True)
        print("matplotlib is not installed: no plot")
        return
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    machine = report["machine"]
    shapes = {shape.name: shape for shape in SHAPES}
    figure, axes = plt.subplots(figsize=(9, 6))
    grid = [2 ** (i / 8) for i in range(24, 81)]
    roof = [min(machine["bf16_gemm_tflops"], x * machine["read_gbps"] / 1e3) for x in grid]
    axes.plot(grid, roof, color="black", linewidth=1, label="measured roofs")
    marks = {
        "mla_kernels/hopper/pow2": ("o", "tab:red"),
        "mla_kernels/triton/pow2": ("s", "tab:orange"),
        "peer/flashmla": ("^", "tab:blue"),
        "peer/fa3": ("v", "tab:green"),
        "peer/vllm_triton": ("x", "tab:gray"),
    }
    for impl, (marker, colour) in marks.items():
        rows = [r for r in report["rows"] if r["impl"] == impl and "us" in r]
        x = [shapes[r["case"]].flops / shapes[r["case"]].bytes for r in rows]
        axes.scatter(x, [r["tflops"] for r in rows], marker=marker, color=colour, s=28, label=impl)
    axes.set(
        xscale="log", yscale="log", xlabel="FLOP / byte", ylabel="TFLOPS",
        title=f"Dense MLA decode, {machine['gpu']}",
    )  # fmt: skip
    axes.legend()
    axes.grid(alpha=0.3, which="both")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)  # pages are written again with each case
