# SPDX-License-Identifier: Apache-2.0
"""Launches the Hopper score kernels. Arguments are checked by the public functions."""

from typing import Any

import torch
import triton
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from mla_kernels.indexer.hopper import scores as kernel
from mla_kernels.indexer.hopper.several import hopper_several_scores_kernel
from mla_kernels.indexer.triton.launcher import TILE_COUNTS, padded_heads
from mla_kernels.layouts import BLOCK_SIZE
from mla_kernels.triton_common.launch import launch

CTAS_PER_SM = 4
STAGES = 2
MAX_ROWS = 1024
OPTIONS = {"num_warps": 4, "maxnreg": 128}
# By rows a tile: CTAs an SM, as many as its shared memory and these registers leave room for.
SEVERAL = {1: (4, 128), 2: (3, 168), 3: (2, 255), 4: (2, 255)}
MAX_TILES = TILE_COUNTS[-1]


def refusal(
    q: torch.Tensor, k_cache: torch.Tensor, block_table: torch.Tensor, *, ragged: bool
) -> str | None:
    """Why the Hopper kernels cannot take these arguments; None if they can."""
    if q.dtype != torch.float8_e4m3fn or k_cache.dtype != torch.uint8:
        return f"it needs e4m3 q and an fp8 cache, got {q.dtype} and {k_cache.dtype}"
    if not k_cache.is_contiguous() or k_cache.data_ptr() % 16:
        return "it needs a contiguous cache, aligned to 16 bytes"
    if one_row_each(q, block_table, ragged=ragged) and q.shape[0] > MAX_ROWS:
        return f"of one row a request it takes at most {MAX_ROWS}"
    return None


def one_row_each(q: torch.Tensor, block_table: torch.Tensor, *, ragged: bool) -> bool:
    """Whether the rows are the requests, in order."""
    return not ragged and q.shape[0] == block_table.shape[0]


def launch_hopper_scores(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    weights: torch.Tensor,
    block_table: torch.Tensor,
    lengths: torch.Tensor,
    scores: torch.Tensor,
    *,
    request_ids: torch.Tensor | None = None,
    level1: torch.Tensor | None = None,
) -> None:
    """scores [T, 64 * max_blocks], written up to the end of each row's last page; with `level1`
    (int32 [T, 8 * max_blocks]) also the first level of the top-k, up to the same point.
    """
    T, H, D = q.shape
    B, max_blocks = block_table.shape
    if T == 0 or max_blocks == 0 or k_cache.shape[0] == 0:
        return
    sms = torch.cuda.get_device_properties(q.device).multi_processor_count
    lines = k_cache.view(-1, D)
    descriptors = (
        TensorDescriptor.from_tensor(lines, [BLOCK_SIZE, D], kernel.KEYS.value),
        TensorDescriptor.from_tensor(lines, [2, D], kernel.SCALES.value),
    )
    strides = (
        q.stride(0),
        q.stride(1),
        weights.stride(0),
        block_table.stride(0),
        scores.stride(0),
        0 if level1 is None else level1.stride(0),
    )
    if one_row_each(q, block_table, ragged=request_ids is not None):
        launch(
            kernel.hopper_scores_kernel,
            (CTAS_PER_SM * sms,),
            *descriptors,
            q.view(torch.uint8),
            weights,
            block_table,
            lengths,
            scores,
            level1,
            T,
            max_blocks * BLOCK_SIZE,
            *strides,
            **constants(T, H),
            **OPTIONS,
        )
        return
    rows_per_request = 1 if request_ids is not None else T // B
    rows = rows_a_tile(T, B, ragged=request_ids is not None)
    ctas, registers = SEVERAL[rows]
    # Of whole requests, or of whole tiles.
    turn = MAX_TILES * rows
    if request_ids is None:
        turn = MAX_TILES // triton.cdiv(rows_per_request, rows) * rows_per_request
    for a in range(0, T, turn):
        b = min(a + turn, T)
        tiles = triton.cdiv(b - a, rows)
        if request_ids is None:
            tiles = (b - a) // rows_per_request * triton.cdiv(rows_per_request, rows)
        launch(
            hopper_several_scores_kernel,
            (ctas * sms,),
            *descriptors,
            q[a:b].view(torch.uint8),
            weights[a:b],
            block_table if request_ids is not None else block_table[a // rows_per_request :],
            None if request_ids is None else request_ids[a:b],
            lengths[a:b],
            scores[a:b],
            None if level1 is None else level1[a:b],
            tiles,
            b - a,
            rows_per_request,
            max_blocks * BLOCK_SIZE,
            *strides,
            **several_constants(rows, tiles, H),
            num_warps=4,
            maxnreg=registers,
        )


def constants(rows: int, heads: int) -> dict[str, Any]:
    """Compile-time arguments."""
    return {
        "H": heads,
        "HEADS": padded_heads(heads),
        "ROWS": triton.next_power_of_2(rows),
        "STAGES": STAGES,
    }


def rows_a_tile(T: int, B: int, *, ragged: bool) -> int:
    """Rows that share the loads of a page: of T ragged rows clearly several a request, or none."""
    if ragged:
        return 4 if T > 4 * B else 1
    return triton.cdiv(T // B, triton.cdiv(T // B, 4))


def several_constants(rows: int, tiles: int, heads: int) -> dict[str, Any]:
    """Compile-time arguments of the kernel for several rows a tile."""
    return {
        "H": heads,
        "HEADS": padded_heads(heads),
        "ROWS": rows,
        "TILES": next(n for n in TILE_COUNTS if n >= tiles),
        "STAGES": STAGES,
    }
