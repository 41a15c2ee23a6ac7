# SPDX-License-Identifier: Apache-2.0
"""What the GPU benchmarks share: the machine and its measured roofs, timing by graph replays."""

import statistics
from collections.abc import Callable
from typing import Any

import torch
import triton

DEVICE = "cuda"
_FLUSH_BYTES = 256 * 2**20  # several times the L2


class Timer:
    """Medians of CUDA-graph replays, each after a write that pushes everything out of the L2."""

    def __init__(self) -> None:
        self._flush = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device=DEVICE)

    def capture(self, fn: Callable[[], object]) -> torch.cuda.CUDAGraph:
        """fn as a graph, after a run that compiles what it launches."""
        fn()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            fn()
        return graph

    def medians(
        self, fns: dict[str, Callable[[], object]], *, rounds: int = 3, repeats: int = 10
    ) -> dict[str, float]:
        """Microseconds of each function: back-to-back replays, the functions in turn each round."""
        graphs = {name: self.capture(fn) for name, fn in fns.items()}
        pairs: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {n: [] for n in graphs}
        for _ in range(rounds):
            for name, graph in graphs.items():
                torch.cuda.synchronize()
                for _ in range(repeats):
                    self._flush.zero_()
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


def describe_gpu() -> dict[str, Any]:
    """The GPU, the versions, and the roofs measured now."""
    properties = torch.cuda.get_device_properties(0)
    return {
        "gpu": properties.name,
        "sms": properties.multi_processor_count,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
        **measure_roofs(),
    }


def measure_roofs() -> dict[str, float]:
    """Read bandwidth (a sum over 8 GB) and the bf16 GEMM rate (8192^3, random data, 1 s of it)."""
    x = torch.empty(2**31, dtype=torch.float32, device=DEVICE).normal_()
    read_us = _median_us(lambda: torch.sum(x), 10)
    n = 8192
    a, b = (torch.randn(n, n, dtype=torch.bfloat16, device=DEVICE) for _ in range(2))
    gemm_us = _median_us(lambda: torch.mm(a, b), 600)
    return {
        "read_gbps": round(x.numel() * 4 / read_us / 1e3, 1),
        "bf16_gemm_tflops": round(2 * n**3 / gemm_us / 1e6, 1),
    }


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
