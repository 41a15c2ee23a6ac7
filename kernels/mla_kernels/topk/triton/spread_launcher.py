# SPDX-License-Identifier: Apache-2.0
"""Launches the kernels that share each of few rows among many programs."""

from functools import cache
from typing import Any

import torch

from mla_kernels.arch import device_arch
from mla_kernels.topk.plan import (
    SPREAD_WORDS,
    cdiv,
    next_power_of_2,
    spread_chunk,
    state_view,
    topk_tiles,
)
from mla_kernels.topk.triton.spread import OUTPUT, clear_state_kernel, spread_topk_kernel
from mla_kernels.triton_common.launch import launch
from mla_kernels.triton_common.runtime import INTERPRET

CLEAR_WARPS = 8
CLEAR_BLOCK = next_power_of_2(SPREAD_WORDS)


@cache
def resident_programs(device: torch.device) -> int:
    """Programs that surely run at once, one an SM; 0 where rows are not to be shared."""
    if INTERPRET:
        return 12
    if device_arch(device).sm == 0:
        return 0
    return torch.cuda.get_device_properties(device).multi_processor_count


def chunk_of_rows(rows: int, width: int, k: int, device: torch.device) -> int | None:
    """Keys a program if rows of this width are to be shared; None if each is one program's."""
    if topk_tiles(width, k).levels == 0:
        return None
    return spread_chunk(rows, width, resident_programs(device))


def launch_spread(
    scores: torch.Tensor,
    k: int,
    lengths: torch.Tensor | None,
    out: torch.Tensor,
    workspace: torch.Tensor,
    chunk: int,
    *,
    pdl: bool,
) -> None:
    """See `exact_topk`."""
    T, width = scores.shape
    state = state_view(workspace, T)
    clear_state(state, pdl=pdl)
    steps = [(0, OUTPUT.value)]
    if INTERPRET:  # one program after the other: a launch a step
        steps = [(step, step) for step in range(OUTPUT.value + 1)]
    for first, last in steps:
        launch(
            spread_topk_kernel,
            (cdiv(width, chunk), T),
            scores,
            lengths,
            state,
            out,
            width,
            scores.stride(0),
            out.stride(0),
            **spread_constants(
                k,
                width,
                chunk,
                first,
                last,
                has_lengths=lengths is not None,
                pdl=pdl,
                ptx=not INTERPRET,
            ),
            **spread_options(chunk, pdl=pdl),
        )


def clear_state(state: torch.Tensor, *, pdl: bool) -> None:
    """Zeroes the state of all rows."""
    launch(
        clear_state_kernel,
        (len(state),),
        state,
        BLOCK=CLEAR_BLOCK,
        PDL=pdl,
        num_warps=CLEAR_WARPS,
        launch_pdl=pdl,
    )


def spread_constants(
    k: int,
    width: int,
    chunk: int,
    first: int,
    last: int,
    *,
    has_lengths: bool,
    pdl: bool,
    ptx: bool,
) -> dict[str, Any]:
    """Compile-time arguments."""
    parts = next_power_of_2(cdiv(width, chunk))
    if parts > 32:  # either one warp reads the words of all programs, or each thread its own
        parts = max(parts, 32 * spread_warps(chunk))
    return {
        "K": k,
        "K_POW2": next_power_of_2(k),
        "CHUNK": chunk,
        "PARTS": parts,
        "FIRST": first,
        "LAST": last,
        "HAS_LENGTHS": has_lengths,
        "ALIGNED": width % 16 == 0,
        "PTX": ptx,
        "PDL": pdl,
    }


def spread_warps(chunk: int) -> int:
    if chunk == 2048:  # measured: 0.6 to 1.9 us less than with 4; 4096 keys gain nothing by it
        return 16
    return min(max(chunk // 512, 4), 16)


def spread_options(chunk: int, *, pdl: bool) -> dict[str, Any]:
    """How the kernel is compiled and launched."""
    return {
        "num_warps": spread_warps(chunk),
        "maxnreg": 128,  # left alone, ptxas halves them for 16384 keys and spills
        "launch_cooperative_grid": True,  # all programs at once, whatever else is running
        "launch_pdl": pdl,
    }
