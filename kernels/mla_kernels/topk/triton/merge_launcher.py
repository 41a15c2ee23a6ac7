# SPDX-License-Identifier: Apache-2.0
"""Launches the kernel that merges the choices of ranks."""

from typing import Any

import torch

from mla_kernels.topk.plan import next_power_of_2
from mla_kernels.topk.triton.merge import merge_topk_kernel
from mla_kernels.triton_common.launch import launch


def launch_merge_topk(
    candidates: torch.Tensor, rank: int, interleave: int, out: torch.Tensor
) -> None:
    """See `merge_topk`. Not by programmatic dependent launch: what was gathered is written by
    kernels that are not ours, and nothing of it may be read before they end."""
    ranks, T, _, k = candidates.shape
    if T == 0:
        return
    launch(
        merge_topk_kernel,
        (T,),
        candidates,
        out,
        T,
        rank,
        interleave,
        out.stride(0),
        **merge_constants(ranks, k),
        num_warps=merge_warps(ranks, k),
    )


def merge_constants(ranks: int, k: int) -> dict[str, Any]:
    """Compile-time arguments."""
    return {
        "K": k,
        "K_POW2": next_power_of_2(k),
        "RANKS": ranks,
        "RANKS_POW2": next_power_of_2(ranks),
    }


def merge_warps(ranks: int, k: int) -> int:
    """32 candidates a thread at most, each a key and a position; no more threads than columns."""
    tile = next_power_of_2(ranks) * next_power_of_2(k)
    return min(max(tile // 1024, 4), 32)
