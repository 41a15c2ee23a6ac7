# SPDX-License-Identifier: Apache-2.0
"""Launches the Hopper score kernel. Arguments are checked by the public functions."""

from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from mla_kernels.indexer.hopper.layouts import KEYS, SCALES
from mla_kernels.indexer.hopper.scores import hopper_scores_kernel
from mla_kernels.indexer.triton.launcher import TILE_COUNTS, padded_heads
from mla_kernels.layouts import BLOCK_SIZE
from mla_kernels.triton_common.launch import launch

STAGES = 2


@dataclass(frozen=True)
class RowTile:
    """rows: that share the loads of a page; ctas: an SM, as many as its shared memory and these
    registers a thread leave room for."""

    rows: int
    ctas: int
    registers: int

    @property
    def options(self) -> dict[str, int]:
        return {"num_warps": 4, "maxnreg": self.registers}


ONE = RowTile(1, 4, 128)
# More rows a tile spill, and are not faster.
TWO_F16 = RowTile(2, 3, 168)
TWO_FP8 = RowTile(2, 4, 128)


def refusal(q: torch.Tensor, k_cache: torch.Tensor) -> str | None:
    """Why the Hopper kernel cannot take these arguments; None if it can."""
    if q.dtype != torch.float8_e4m3fn or k_cache.dtype != torch.uint8:
        return f"it needs e4m3 q and an fp8 cache, got {q.dtype} and {k_cache.dtype}"
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
    request_ids: torch.Tensor | None = None,
    fp8_products: bool = False,
    tile: RowTile | None = None,
) -> None:
    """scores [T, 64 * max_blocks], written up to the end of each row's last page.

    `tile`: that of a whole call, of which these rows are a part.
    """
    T, H, D = q.shape
    B, max_blocks = block_table.shape
    if T == 0 or max_blocks == 0 or k_cache.shape[0] == 0:
        return
    ragged = request_ids is not None
    rows_per_request = 1 if ragged else T // B
    lines = k_cache.view(-1, D)
    tile = tile or row_tile(T, B, ragged=ragged, fp8_products=fp8_products)
    tiles = triton.cdiv(T, tile.rows) if ragged else B * triton.cdiv(rows_per_request, tile.rows)
    launch(
        hopper_scores_kernel,
        (tile.ctas * torch.cuda.get_device_properties(q.device).multi_processor_count,),
        TensorDescriptor.from_tensor(lines, [BLOCK_SIZE, D], KEYS.value),
        TensorDescriptor.from_tensor(lines, [2, D], SCALES.value),
        q.view(torch.uint8),
        weights,
        block_table,
        request_ids,
        lengths,
        scores,
        tiles,
        T,
        rows_per_request,
        max_blocks * BLOCK_SIZE,
        q.stride(0),
        q.stride(1),
        weights.stride(0),
        block_table.stride(0),
        scores.stride(0),
        **constants(tile, tiles, H, fp8_products=fp8_products),
        **tile.options,
    )


def row_tile(T: int, B: int, *, ragged: bool, fp8_products: bool) -> RowTile:
    """For T rows of B requests. Ragged ones are taken one by one unless there are clearly several
    of each request."""
    if T <= (4 * B if ragged else B):
        return ONE
    return TWO_FP8 if fp8_products else TWO_F16


def constants(tile: RowTile, tiles: int, heads: int, *, fp8_products: bool) -> dict[str, Any]:
    """Compile-time arguments."""
    return {
        "H": heads,
        "HEADS": padded_heads(heads),
        "ROWS": tile.rows,
        "TILES": next((n for n in TILE_COUNTS if n >= tiles), TILE_COUNTS[-1]),
        "IN_TURNS": tiles > TILE_COUNTS[-1],
        "STAGES": STAGES,
        "FP8": fp8_products,
    }
