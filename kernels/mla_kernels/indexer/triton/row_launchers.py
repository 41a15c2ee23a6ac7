# SPDX-License-Identifier: Apache-2.0
"""Launches the indexer's small kernels. Arguments are checked by the public functions."""

from typing import Any

import torch
import triton

from mla_kernels.arch import device_arch
from mla_kernels.indexer.triton.cache import write_indexer_cache_kernel
from mla_kernels.indexer.triton.rows import (
    chosen_values_kernel,
    fill_tail_kernel,
    lengths_kernel,
    positions_to_slots_kernel,
    token_rows_kernel,
)
from mla_kernels.layouts import BLOCK_SIZE
from mla_kernels.triton_common.launch import launch
from mla_kernels.triton_common.runtime import INTERPRET

FILL_BLOCK = 4096
LENGTHS_BLOCK = 256
SLOTS_BLOCK = 512


def launch_fill_tail(scores: torch.Tensor, lengths: torch.Tensor) -> None:
    """-inf from the end of each row's last page to the end of the row."""
    T, width = scores.shape
    if T == 0 or width == 0:
        return
    splits = min(triton.cdiv(width, FILL_BLOCK), max(triton.cdiv(2048, T), 1))
    launch(
        fill_tail_kernel,
        (T, splits),
        lengths,
        scores,
        width,
        scores.stride(0),
        PAGE=BLOCK_SIZE,
        BLOCK=FILL_BLOCK,
    )


def launch_lengths(
    seq_lens: torch.Tensor,
    T: int,
    positions: torch.Tensor | None,
    request_ids: torch.Tensor | None,
) -> torch.Tensor:
    """`indexer_lengths` in one launch."""
    out = torch.empty(T, dtype=torch.int32, device=seq_lens.device)
    if T:
        launch(
            lengths_kernel,
            (triton.cdiv(T, LENGTHS_BLOCK),),
            seq_lens,
            positions,
            request_ids,
            out,
            T,
            1 if request_ids is not None else T // seq_lens.shape[0],
            BLOCK=LENGTHS_BLOCK,
            HAS_POSITIONS=positions is not None,
            RAGGED=request_ids is not None,
        )
    return out


def launch_token_rows(
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    request_ids: torch.Tensor,
    lengths: torch.Tensor,
) -> None:
    """`token_rows` in one launch."""
    B, T = seq_lens.shape[0], request_ids.shape[0]
    if T:
        launch(
            token_rows_kernel,
            (triton.cdiv(T, LENGTHS_BLOCK),),
            query_start_loc,
            seq_lens,
            request_ids,
            lengths,
            B,
            T,
            B.bit_length(),
            BLOCK=LENGTHS_BLOCK,
        )


def launch_write_indexer_cache(
    k: torch.Tensor, k_cache: torch.Tensor, slot_mapping: torch.Tensor, *, scale_format: str
) -> None:
    tokens, D = slot_mapping.shape[0], k.shape[1]
    if tokens == 0:
        return
    launch(
        write_indexer_cache_kernel,
        (tokens,),
        k,
        k_cache,
        slot_mapping,
        k.stride(0),
        k_cache.stride(0),
        **write_constants(
            D,
            fp8=k_cache.dtype == torch.uint8,
            ue8m0=scale_format == "ue8m0",
            fp8_hardware=not INTERPRET and device_arch(k.device).e4m3_convert,
        ),
        num_warps=1,
    )


def write_constants(D: int, *, fp8: bool, ue8m0: bool, fp8_hardware: bool) -> dict[str, Any]:
    """Compile-time arguments of the cache write kernel."""
    return {
        "D": D,
        "D_POW2": triton.next_power_of_2(D),
        "PAGE": BLOCK_SIZE,
        "FP8": fp8,
        "UE8M0": ue8m0,
        "FP8_HARDWARE": fp8_hardware,
    }


def launch_positions_to_slots(
    positions: torch.Tensor,
    block_table: torch.Tensor,
    request_ids: torch.Tensor | None,
    block_size: int,
    out: torch.Tensor,
) -> None:
    """`positions_to_slots` into a contiguous out."""
    T, K = positions.shape
    if out.numel():
        launch(
            positions_to_slots_kernel,
            (T, triton.cdiv(K, SLOTS_BLOCK)),
            positions,
            block_table,
            request_ids,
            out,
            K,
            block_table.shape[1],
            1 if request_ids is not None else T // block_table.shape[0],
            block_size,
            positions.stride(0),
            block_table.stride(0),
            BLOCK=SLOTS_BLOCK,
            RAGGED=request_ids is not None,
        )


def launch_chosen_values(scores: torch.Tensor, chosen: torch.Tensor, values: torch.Tensor) -> None:
    """`write_values` in one launch, which allocates nothing."""
    T, K = chosen.shape
    if chosen.numel():
        launch(
            chosen_values_kernel,
            (T, triton.cdiv(K, SLOTS_BLOCK)),
            scores,
            chosen,
            values,
            K,
            scores.stride(0),
            chosen.stride(0),
            values.stride(0),
            BLOCK=SLOTS_BLOCK,
        )
