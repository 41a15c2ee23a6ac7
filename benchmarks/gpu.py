# SPDX-License-Identifier: Apache-2.0
"""What the GPU benchmarks share: the machine and its measured roofs, timing by graph replays, and
whether peers are there."""

import importlib.util
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import triton
from machine import commit
from mla_kernels.testing.graphs import captured
from power import PowerMeter

DEVICE = "cuda"
READ_BYTES = 2**33
_GEMM_SIZE = 8192
GEMM_FLOPS = 2 * _GEMM_SIZE**3
_FLUSH_BYTES = 256 * 2**20  # several times the L2
_PAUSE_SECONDS = 5e-3
_LEAD_SECONDS = 1.0  # of a sustained run, not measured: until clocks and power have settled
_BURST_SECONDS = 0.05  # replays of a sustained run that are launched at once


def need_gpu() -> None:
    """SystemExit where torch sees no GPU."""
    if not torch.cuda.is_available():
        raise SystemExit(
            "this benchmark needs an NVIDIA GPU, and torch sees none: `mla-backend doctor` says "
            "what is missing, benchmarks/README.md what runs without one"
        )


def without_vllm(problem: Exception) -> bool:
    """Whether a peer cannot be imported because vLLM is not installed. Where it is, what does not
    load is a fault, of which a page without that peer would say nothing."""
    return isinstance(problem, ImportError) and importlib.util.find_spec("vllm") is None


class Timer:
    """Medians of CUDA-graph replays, each after a read that pushes everything out of the L2.

    A read, because a write leaves the L2 full of dirty lines, which go back to memory under the
    timed kernel and at its cost. What runs between two attention layers reads far more than it
    writes.
    """

    def __init__(self) -> None:
        self._other = torch.ones(_FLUSH_BYTES // 4, dtype=torch.float32, device=DEVICE)

    def _flush(self) -> None:
        torch.sum(self._other)

    def medians(
        self, fns: dict[str, Callable[[], object]], *, rounds: int = 3, repeats: int = 10
    ) -> dict[str, float]:
        """Microseconds of each function: back-to-back replays, the functions in turn each round."""
        graphs = {name: captured(fn)[0] for name, fn in fns.items()}
        pairs: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {n: [] for n in graphs}
        for _ in range(rounds):
            for name, graph in graphs.items():
                torch.cuda.synchronize()
                for _ in range(repeats):
                    self._flush()
                    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                    start.record()
                    graph.replay()
                    end.record()
                    pairs[name].append((start, end))
        torch.cuda.synchronize()
        return {
            name: statistics.median(1e3 * start.elapsed_time(end) for start, end in times)
            for name, times in pairs.items()
        }

    def paused(
        self, fns: dict[str, Callable[[], object]], *, rounds: int = 3, repeats: int = 5
    ) -> dict[str, float]:
        """Microseconds of each function when the GPU was idle before every replay.

        A kernel of one thread runs while the CPU launches the graph, so that the launch is not
        timed.
        """
        graphs = {name: captured(fn)[0] for name, fn in fns.items()}
        times: dict[str, list[float]] = {name: [] for name in graphs}
        for _ in range(rounds):
            for name, graph in graphs.items():
                for _ in range(repeats):
                    self._flush()
                    torch.cuda.synchronize()
                    time.sleep(_PAUSE_SECONDS)
                    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                    torch.cuda._sleep(100_000)
                    start.record()
                    graph.replay()
                    end.record()
                    torch.cuda.synchronize()
                    times[name].append(1e3 * start.elapsed_time(end))
        return {name: statistics.median(found) for name, found in times.items()}


def sustained(fn: Callable[[], object], seconds: float) -> dict[str, float]:
    """Replays of fn for `seconds`, back to back, after a lead of the same.

    us: mean of a replay; with NVML also watts, sm_mhz and joule_per_step. The L2 is not flushed:
    for functions that read several times its size.
    """
    (graph, _), meter = captured(fn), PowerMeter()

    def burst(count: int) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(count):
            graph.replay()
        end.record()
        return start, end

    def run(duration: float, count: int) -> float:
        """Mean microseconds of a replay; the next burst is launched before this one has ended."""
        until = time.monotonic() + duration
        bursts = [burst(count)]
        while time.monotonic() < until:
            bursts.append(burst(count))
            bursts[-2][1].synchronize()
        torch.cuda.synchronize()
        return 1e3 * statistics.mean(a.elapsed_time(b) for a, b in bursts) / count

    count = max(1, round(_BURST_SECONDS * 1e6 / run(0.0, 3)))
    run(_LEAD_SECONDS, count)
    meter.start()
    us = run(seconds, count)
    found = {"us": us, **meter.read()}
    if "watts" in found:
        found["joule_per_step"] = round(found["watts"] * us / 1e6, 4)
    return found


def describe_gpu() -> dict[str, Any]:
    """The GPU, the versions, and the roofs measured now."""
    return {**describe_versions(), **measure_roofs()}


def describe_versions() -> dict[str, Any]:
    """The GPU and the versions, this repository's commit among them."""
    properties = torch.cuda.get_device_properties(0)
    return {
        "gpu": properties.name,
        "sms": properties.multi_processor_count,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
        "commit": commit(),
    }


def measure_roofs() -> dict[str, float]:
    """Read bandwidth (a sum over 8 GB) and the bf16 GEMM rate (8192^3, random data, 1 s of it)."""
    read, gemm = roof_functions()
    return {
        "read_gbps": round(READ_BYTES / _median_us(read, 10) / 1e3, 1),
        "bf16_gemm_tflops": round(GEMM_FLOPS / _median_us(gemm, 600) / 1e6, 1),
    }


def roof_functions() -> tuple[Callable[[], object], Callable[[], object]]:
    """A read of READ_BYTES and a bf16 matrix product of GEMM_FLOPS."""
    x = torch.empty(READ_BYTES // 4, dtype=torch.float32, device=DEVICE).normal_()
    a, b = (
        torch.randn(_GEMM_SIZE, _GEMM_SIZE, dtype=torch.bfloat16, device=DEVICE) for _ in range(2)
    )
    return (lambda: torch.sum(x)), (lambda: torch.mm(a, b))


def _median_us(fn: Callable[[], object], repeats: int) -> float:
    for _ in range(3):
        fn()
    pairs = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        fn()
        end.record()
        pairs.append((start, end))
    torch.cuda.synchronize()
    return statistics.median(1e3 * start.elapsed_time(end) for start, end in pairs[repeats // 2 :])
