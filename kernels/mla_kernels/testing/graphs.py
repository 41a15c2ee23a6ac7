# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs of what tests and benchmarks call."""

from collections.abc import Callable
from typing import TypeVar

import torch

Result = TypeVar("Result")


def captured(call: Callable[[], Result]) -> tuple[torch.cuda.CUDAGraph, Result]:
    """`call` as a graph, and what it returned there. It runs once before, so that what it launches
    is compiled."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    return graph, result
