# SPDX-License-Identifier: Apache-2.0
"""Launches the top-k kernels."""

from typing import Any

import torch

from mla_kernels.arch import AMD, Arch, device_arch
from mla_kernels.topk.plan import (
    TopkTiles,
    cdiv,
    exact_topk_workspace,
    level_views,
    next_power_of_2,
    topk_tiles,
)
from mla_kernels.topk.triton import many_launcher, spread_launcher
from mla_kernels.topk.triton.select import group_max_kernel, select_kernel
from mla_kernels.triton_common.launch import launch
from mla_kernels.triton_common.runtime import INTERPRET

# Scores that a program of the group kernel takes at a time.
CHUNK = 2048
GROUP_MAX_WARPS = 4


def exact_topk_triton(
    scores: torch.Tensor,
    k: int,
    *,
    lengths: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `exact_topk`."""
    T, width = scores.shape
    if out is None:
        out = torch.empty((T, k), dtype=torch.int32, device=scores.device)
    if T == 0 or width == 0:
        return out.fill_(-1)
    tiles = topk_tiles(width, k)
    arch = None if INTERPRET else device_arch(scores.device)
    pdl = arch is not None and arch.programmatic_launch
    if many_launcher.are_many(T, width, k, scores.device):
        if workspace is None:
            workspace = exact_topk_workspace(T, width, scores.device)
        many_launcher.launch_many(scores, k, lengths, out, workspace, pdl=pdl)
        return out
    level1 = level2 = None
    if tiles.levels:
        if workspace is None:
            workspace = exact_topk_workspace(T, width, scores.device)
        chunk = spread_launcher.chunk_of_rows(T, width, k, scores.device)
        if chunk is not None:
            spread_launcher.launch_spread(scores, k, lengths, out, workspace, chunk, pdl=pdl)
            return out
        level1, level2 = level_views(workspace, T, width)
        launch_group_max(scores, lengths, level1, level2, tiles, pdl=pdl)
    launch(
        select_kernel,
        (T,),
        scores,
        lengths,
        level1,
        level2,
        out,
        width,
        scores.stride(0),
        level1.stride(0) if level1 is not None else 0,
        level2.stride(0) if level2 is not None else 0,
        out.stride(0),
        **select_constants(
            tiles,
            k,
            width,
            has_lengths=lengths is not None,
            ptx=arch is not None and arch.sm > 0,
            pdl=pdl,
        ),
        num_warps=select_warps(tiles, arch),
        launch_pdl=pdl,
    )
    return out


def select_warps(tiles: TopkTiles, arch: Arch | None) -> int:
    """Warps of the select kernel; on AMD more of them would spill."""
    return 4 if arch == AMD else tiles.num_warps


def select_constants(
    tiles: TopkTiles, k: int, width: int, *, has_lengths: bool, ptx: bool, pdl: bool
) -> dict[str, Any]:
    """Compile-time arguments of the select kernel."""
    return {
        "K": k,
        "K_POW2": next_power_of_2(k),
        "TOP": tiles.top,
        "TILE": tiles.tile,
        "LEVELS": tiles.levels,
        "HAS_LENGTHS": has_lengths,
        "ALIGNED": width % 16 == 0,
        "PTX": ptx,
        "PDL": pdl,
    }


def group_max_constants(
    tiles: TopkTiles, width: int, *, has_lengths: bool, pdl: bool
) -> dict[str, Any]:
    """Compile-time arguments of the group kernel."""
    return {
        "TOP": tiles.top,
        "LEVELS": tiles.levels,
        "CHUNK": CHUNK,
        "HAS_LENGTHS": has_lengths,
        "ALIGNED": width % 16 == 0,
        "PDL": pdl,
    }


def launch_group_max(
    scores: torch.Tensor,
    lengths: torch.Tensor | None,
    level1: torch.Tensor,
    level2: torch.Tensor,
    tiles: TopkTiles,
    *,
    pdl: bool,
) -> None:
    """Fills levels 1 and 2. About 4096 programs at most, each row spread over as many as it can."""
    T, width = scores.shape
    splits = min(cdiv(width, CHUNK), max(cdiv(4096, T), 1))
    launch(
        group_max_kernel,
        (T, splits),
        scores,
        lengths,
        level1,
        level2,
        width,
        scores.stride(0),
        level1.stride(0),
        level2.stride(0),
        **group_max_constants(tiles, width, has_lengths=lengths is not None, pdl=pdl),
        num_warps=GROUP_MAX_WARPS,
        launch_pdl=pdl,
    )
