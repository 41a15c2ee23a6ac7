# SPDX-License-Identifier: Apache-2.0
"""Launches the Hopper score kernel. Arguments are checked by the public functions."""

from typing import Any

import torch
import triton
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from mla_kernels.indexer.hopper import scores as kernel
from mla_kernels.indexer.triton.launcher import padded_heads
from mla_kernels.layouts import BLOCK_SIZE
from mla_kernels.triton_common.launch import launch

CTAS_PER_SM = 4
STAGES = 2
MAX_ROWS = 1024
OPTIONS = {"num_warps": 4, "maxnreg": 128}


def refusal(
    q: torch.Tensor, k_cache: torch.Tensor, block_table: torch.Tensor, *, ragged: bool
) -> str | None:
    """Why the Hopper kernel cannot take these arguments; None if it can."""
    if q.dtype != torch.float8_e4m3fn or k_cache.dtype != torch.uint8:
        return f"it needs e4m3 q and an fp8 cache, got {q.dtype} and {k_cache.dtype}"
    if ragged or q.shape[0] != block_table.shape[0] or q.shape[0] > MAX_ROWS:
        return f"it needs one row a request and at most {MAX_ROWS}"
    if not k_cache.is_contiguous() or k_cache.data_ptr() % 16:
        return "it needs a contiguous cache, aligned to 16 bytes"
    return None


def launch_hopper_scores(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    weights: torch.Tensor,
    block_table: torch.Tensor,
    lengths: torch.Tensor,
    scores: torch.Tensor,
    *,
    level1: torch.Tensor | None = None,
) -> None:
    """scores [T, 64 * max_blocks], written up to the end of each row's last page; with `level1`
    (int32 [T, 8 * max_blocks]) also the first level of the top-k, up to the same point.
    """
    T, H, D = q.shape
    max_blocks = block_table.shape[1]
    if T == 0 or max_blocks == 0 or k_cache.shape[0] == 0:
        return
    lines = k_cache.view(-1, D)
    programs = CTAS_PER_SM * torch.cuda.get_device_properties(q.device).multi_processor_count
    launch(
        kernel.hopper_scores_kernel,
        (programs,),
        TensorDescriptor.from_tensor(lines, [BLOCK_SIZE, D], kernel.KEYS.value),
        TensorDescriptor.from_tensor(lines, [2, D], kernel.SCALES.value),
        q.view(torch.uint8),
        weights,
        block_table,
        lengths,
        scores,
        level1,
        T,
        max_blocks * BLOCK_SIZE,
        q.stride(0),
        q.stride(1),
        weights.stride(0),
        block_table.stride(0),
        scores.stride(0),
        0 if level1 is None else level1.stride(0),
        **constants(T, H),
        **OPTIONS,
    )


def constants(rows: int, heads: int) -> dict[str, Any]:
    """Compile-time arguments."""
    return {
        "H": heads,
        "HEADS": padded_heads(heads),
        "ROWS": triton.next_power_of_2(rows),
        "STAGES": STAGES,
    }
