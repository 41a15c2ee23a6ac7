# SPDX-License-Identifier: Apache-2.0
"""The specialisations of the top-k kernels that are compiled offline."""

from mla_kernels.arch import Arch
from mla_kernels.offline.spec import KernelSpec
from mla_kernels.topk.plan import SPREAD_CHUNKS, topk_tiles
from mla_kernels.topk.triton.launcher import (
    GROUP_MAX_WARPS,
    group_max_constants,
    select_constants,
    select_warps,
)
from mla_kernels.topk.triton.many import many_rows_kernel
from mla_kernels.topk.triton.many_launcher import many_constants, many_options
from mla_kernels.topk.triton.merge import merge_topk_kernel
from mla_kernels.topk.triton.merge_launcher import merge_constants, merge_warps
from mla_kernels.topk.triton.select import group_max_kernel, select_kernel
from mla_kernels.topk.triton.spread import OUTPUT, clear_state_kernel, spread_topk_kernel
from mla_kernels.topk.triton.spread_launcher import (
    CLEAR_BLOCK,
    CLEAR_WARPS,
    spread_constants,
    spread_options,
)

STRIDES = {"stride_scores": "i32", "stride_level1": "i32", "stride_level2": "i32"}
LEVELS = {"level1_ptr": "*i32", "level2_ptr": "*i32"}
# Ranks and k of a merge.
RANKS = ((2, 512), (2, 2048), (4, 2048), (8, 2048))
# One width for each number of levels and each number of warps.
SHAPES = ((2048, 64), (8192, 2048), (16384, 2048), (32768, 2048), (131072, 2048), (2**20, 2048))


def specialisations(arch: Arch) -> list[KernelSpec]:
    group_max = [_group_max(arch, width) for width in (131072, 2**20)]
    specs = [_select(arch, width, k) for width, k in SHAPES] + group_max
    specs += [_merge(ranks, k) for ranks, k in RANKS]
    if arch.sm == 0:  # AMD: a program a row, held (spread_launcher.resident_programs)
        return specs
    shared = [_spread(arch, chunk) for chunk in SPREAD_CHUNKS]
    return specs + [_many(arch, k) for k in (64, 2048)] + shared + [_clear(arch)]


def _select(arch: Arch, width: int, k: int) -> KernelSpec:
    tiles = topk_tiles(width, k)
    levels = LEVELS if tiles.levels else {}
    strides = STRIDES if tiles.levels else {"stride_scores": "i32"}
    pointers = {"scores_ptr": "*fp32", "lengths_ptr": "*i32", **levels, "out_ptr": "*i32"}
    unused: dict[str, int | None] = {name: None for name in LEVELS if name not in levels}
    unused |= {name: 0 for name in STRIDES if name not in strides}
    return KernelSpec(
        name=f"exact_topk/select/{width}/{k}",
        fn=select_kernel,
        signature={**pointers, "width": "i32", **strides, "stride_out": "i32"},
        constexprs={
            **unused,
            **select_constants(
                tiles, k, width, has_lengths=True, ptx=arch.sm > 0, pdl=arch.programmatic_launch
            ),
        },
        aligned=(*pointers, "width", *strides, *(["stride_out"] if k % 16 == 0 else [])),
        options={
            "num_warps": select_warps(tiles, arch),
            "launch_pdl": arch.programmatic_launch,
        },
        quick=width in (8192, 131072),
    )


def _many(arch: Arch, k: int) -> KernelSpec:
    pointers = {
        "scores_ptr": "*fp32",
        "lengths_ptr": "*i32",
        "bitmap_ptr": "*i32",
        "list_ptr": "*i32",
        "out_ptr": "*i32",
    }
    strides = {"stride_scores": "i32", "stride_bitmap": "i32", "stride_out": "i32"}
    pdl = arch.programmatic_launch
    return KernelSpec(
        name=f"exact_topk/many/{k}",
        fn=many_rows_kernel,
        signature={**pointers, "width": "i32", **strides},
        constexprs=many_constants(k, has_lengths=True, ptx=True, pdl=pdl),
        aligned=(*pointers, "width", *strides),
        options=many_options(pdl=pdl),
        quick=k == 2048,
    )


def _group_max(arch: Arch, width: int) -> KernelSpec:
    tiles = topk_tiles(width, 2048)
    pointers = {"scores_ptr": "*fp32", "lengths_ptr": "*i32", **LEVELS}
    return KernelSpec(
        name=f"exact_topk/group_max/{width}",
        fn=group_max_kernel,
        signature={**pointers, "width": "i32", **STRIDES},
        constexprs=group_max_constants(
            tiles, width, has_lengths=True, pdl=arch.programmatic_launch
        ),
        aligned=(*pointers, "width", *STRIDES),
        options={"num_warps": GROUP_MAX_WARPS, "launch_pdl": arch.programmatic_launch},
        quick=width == 131072,
    )


def _spread(arch: Arch, chunk: int) -> KernelSpec:
    pointers = {
        "scores_ptr": "*fp32",
        "lengths_ptr": "*i32",
        "state_ptr": "*i32",
        "out_ptr": "*i32",
    }
    strides = {"stride_scores": "i32", "stride_out": "i32"}
    pdl = arch.programmatic_launch
    return KernelSpec(
        name=f"exact_topk/spread/{chunk}",
        fn=spread_topk_kernel,
        signature={**pointers, "width": "i32", **strides},
        constexprs=spread_constants(
            2048,
            131072,
            chunk,
            0,
            OUTPUT.value,
            has_lengths=True,
            pdl=pdl,
            ptx=True,
        ),
        aligned=(*pointers, "width", *strides),
        options=spread_options(chunk, pdl=pdl),
        quick=chunk == 8192,
    )


def _clear(arch: Arch) -> KernelSpec:
    pdl = arch.programmatic_launch
    return KernelSpec(
        name="exact_topk/clear_state",
        fn=clear_state_kernel,
        signature={"state_ptr": "*i32"},
        constexprs={"BLOCK": CLEAR_BLOCK, "PDL": pdl},
        aligned=("state_ptr",),
        options={"num_warps": CLEAR_WARPS, "launch_pdl": pdl},
        quick=True,
    )


def _merge(ranks: int, k: int) -> KernelSpec:
    pointers = {"candidates_ptr": "*i32", "out_ptr": "*i32"}
    return KernelSpec(
        name=f"merge_topk/{ranks}/{k}",
        fn=merge_topk_kernel,
        signature={
            **pointers,
            "num_rows": "i32",
            "rank": "i32",
            "interleave": "i32",
            "stride_out": "i32",
        },
        constexprs=merge_constants(ranks, k),
        aligned=(*pointers, "stride_out"),
        options={"num_warps": merge_warps(ranks, k)},
        quick=(ranks, k) == (2, 2048),
    )
