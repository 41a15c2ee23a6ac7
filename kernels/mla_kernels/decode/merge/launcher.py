# SPDX-License-Identifier: Apache-2.0
"""Launching the merge kernel: its tile, by the splits that a plan makes."""

from dataclasses import dataclass
from functools import cache

import torch
import triton

from mla_kernels.arch import Arch
from mla_kernels.decode.merge.kernel import merge_kernel
from mla_kernels.decode.plan.launcher import DevicePlan
from mla_kernels.triton_common.launch import launch
from mla_kernels.triton_common.runtime import INTERPRET

# fp32 numbers that a program of 4 warps holds in flight: 32 registers a thread.
IN_FLIGHT = 4096
# Programs that keep the device busy; fewer rows get narrower columns.
MIN_PROGRAMS = 256


@dataclass(frozen=True)
class MergeTile:
    """Rows and columns of a program, and the splits it has in flight."""

    rows: int
    cols: int
    splits: int


def merge_tile(plan: DevicePlan) -> MergeTile:
    """Sized for the splits of an even batch; an uneven one only loops more often."""
    return _tile(
        plan.requests.shape[0],
        plan.rows,
        plan.kv_lora_rank,
        plan.parts.shape[0],
        plan.max_chunks if plan.chunk else None,
    )


@cache
def _tile(B: int, num_rows: int, DV: int, parts: int, max_chunks: int | None) -> MergeTile:
    all_rows = B * num_rows
    if max_chunks is not None:
        splits = triton.next_power_of_2(min(max_chunks, 16))
        cols = 256 if all_rows >= 1024 else 128 if all_rows >= 128 else 32
        rows = min(16 // splits, max(1, all_rows // 512))
        return MergeTile(rows=triton.next_power_of_2(rows), cols=cols, splits=splits)
    # Many splits: half of them at a time, with wider columns, is faster than all at once.
    expected = parts // max(B, 1)
    few = min(8, triton.next_power_of_2(expected + 2)) if expected > 2 else 2
    splits = max(few, triton.next_power_of_2(expected + 1) // 4)
    cols = min(DV, IN_FLIGHT // splits)
    while cols > 32 and all_rows * DV // cols < MIN_PROGRAMS:
        cols, splits = cols // 2, splits * 2
    return MergeTile(rows=max(1, IN_FLIGHT // splits // cols), cols=cols, splits=splits)


def launch_merge(plan: DevicePlan, out: torch.Tensor, lse: torch.Tensor, arch: Arch) -> None:
    """Merge the split requests and fill the empty ones; the programs of whole ones exit."""
    B = plan.requests.shape[0]
    if B == 0:
        return
    tile = merge_tile(plan)
    pdl = arch.programmatic_launch and not INTERPRET
    launch(
        merge_kernel,
        (-(-plan.rows // tile.rows), plan.kv_lora_rank // tile.cols, B),
        plan.acc,
        plan.sums,
        plan.requests,
        out,
        lse,
        plan.rows,
        DV=plan.kv_lora_rank,
        ROWS=tile.rows,
        COLS=tile.cols,
        SPLITS=tile.splits,
        ORDERED=plan.chunk > 0,
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )
