# SPDX-License-Identifier: Apache-2.0
"""Launches the kernel of many rows."""

from typing import Any

import torch

from mla_kernels.topk import plan
from mla_kernels.topk.plan import list_views, next_power_of_2, topk_tiles
from mla_kernels.topk.triton.many import many_rows_kernel
from mla_kernels.topk.triton.spread_launcher import resident_programs
from mla_kernels.triton_common.launch import launch
from mla_kernels.triton_common.runtime import INTERPRET

# Halves of a word of the bitmap that are expanded at once.
HALVES = 2048


def are_many(rows: int, width: int, k: int, device: torch.device) -> bool:
    """Whether rows are for this kernel: more than there are SMs, and too long to be held."""
    return topk_tiles(width, k).levels > 0 and rows > resident_programs(device) > 0


def launch_many(
    scores: torch.Tensor,
    k: int,
    lengths: torch.Tensor | None,
    out: torch.Tensor,
    workspace: torch.Tensor,
    *,
    pdl: bool,
) -> None:
    """See `exact_topk`."""
    T, width = scores.shape
    lists, bitmaps = list_views(workspace, T, width)
    launch(
        many_rows_kernel,
        (T,),
        scores,
        lengths,
        bitmaps,
        lists,
        out,
        width,
        scores.stride(0),
        bitmaps.stride(0),
        out.stride(0),
        **many_constants(k, has_lengths=lengths is not None, ptx=not INTERPRET, pdl=pdl),
        **many_options(pdl=pdl),
    )


def many_constants(k: int, *, has_lengths: bool, ptx: bool, pdl: bool) -> dict[str, Any]:
    """Compile-time arguments."""
    return {
        "K": k,
        "K_POW2": next_power_of_2(k),
        "ROOM": plan.LIST_ROOM,
        "TILE": plan.LIST_ROOM,
        "HALVES": HALVES,
        "HAS_LENGTHS": has_lengths,
        "PTX": ptx,
        "PDL": pdl,
    }


def many_options(*, pdl: bool) -> dict[str, Any]:
    """How the kernel is compiled and launched: two programs an SM."""
    return {"num_warps": 8, "maxnreg": 128, "launch_pdl": pdl}
