# SPDX-License-Identifier: Apache-2.0
"""Under which conditions the dense decode benchmark times a kernel."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dense_cases import SHAPES, Shape
from dense_peers import Run
from gpu import GEMM_FLOPS, READ_BYTES, Timer, roof_functions, sustained

Times = dict[str, dict[str, Any]]  # by implementation: us and what else was read


@dataclass(frozen=True)
class Mode:
    """time(timer, shape, runs, seconds); cases and impls: what is measured if nothing is asked."""

    help: str
    note: str  # for the report
    time: Callable[[Timer, Shape, dict[str, Run], float], Times]
    cases: str = ""
    impls: str = ""


def _cold(timer: Timer, shape: Shape, runs: dict[str, Run], seconds: float) -> Times:
    repeats = 5 if shape.flops > 2e11 else 10
    return {name: {"us": us} for name, us in timer.medians(runs, repeats=repeats).items()}


def _paused(timer: Timer, shape: Shape, runs: dict[str, Run], seconds: float) -> Times:
    return {name: {"us": us} for name, us in timer.paused(runs).items()}


def _sustained(timer: Timer, shape: Shape, runs: dict[str, Run], seconds: float) -> Times:
    return {name: sustained(run, seconds) for name, run in runs.items()}


def sustained_roofs(seconds: float) -> dict[str, float]:
    """The roofs of `gpu.measure_roofs` under load, with watts and clock where NVML is there."""
    read, gemm = (sustained(fn, seconds) for fn in roof_functions())
    roofs = {
        "read_gbps": round(READ_BYTES / read["us"] / 1e3, 1),
        "bf16_gemm_tflops": round(GEMM_FLOPS / gemm["us"] / 1e6, 1),
    }
    for name, found in (("read", read), ("bf16_gemm", gemm)):
        roofs |= {f"{name}_{key}": found[key] for key in ("watts", "sm_mhz") if key in found}
    return roofs


_BEST = "hopper/pow2$|triton/pow2$|flashmla|fa3"
MODES = {
    "cold": Mode(
        help="medians of graph replays, cold L2",
        note="medians of CUDA-graph replays, cold L2",
        time=_cold,
    ),
    "paused": Mode(
        help="the GPU idles before every replay; by default the cases of the published tables",
        note="medians of CUDA-graph replays, cold L2, each after 5 ms of an idle GPU",
        time=_paused,
        cases="|".join(f"^{shape.name}$" for shape in SHAPES[:17]),
        impls=_BEST,
    ),
    "sustained": Mode(
        help="replays for seconds at the power cap, with energy; by default four large cases",
        note="means of CUDA-graph replays back to back for seconds, after a second of the same",
        time=_sustained,
        cases="^b96_h128_q[12]_k16384$|^b128_h(16|64)_q1_k4096$",
        impls=_BEST,
    ),
}
