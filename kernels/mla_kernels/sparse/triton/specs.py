# SPDX-License-Identifier: Apache-2.0
"""The specialisations of the sparse kernel and its merge that are compiled offline."""

from collections.abc import Iterator
from itertools import product

import torch

from mla_kernels.arch import Arch
from mla_kernels.decode.triton.launcher import kernel_constants
from mla_kernels.decode.triton.specs import (
    ALIGNMENTS,
    CACHE_POINTER,
    aligned_arguments,
    row_stride,
)
from mla_kernels.decode.triton.support import DIMS
from mla_kernels.layouts import BLOCK_SIZE, MlaDims
from mla_kernels.offline.spec import KernelSpec
from mla_kernels.sparse.triton.kernel import mla_sparse_kernel
from mla_kernels.sparse.triton.launcher import tile_constants, tile_options
from mla_kernels.sparse.triton.results import merge_tile, mla_sparse_merge_kernel
from mla_kernels.sparse.triton.tiles import Tile, choose_tile, unaligned_tile

HEADS = (16, 32, 64)
SCALARS = ("num_slots", "K", "num_heads", "span")
STRIDES = ("q_stride_t", "q_stride_h", "page_stride", "slots_stride")


def specialisations(arch: Arch) -> list[KernelSpec]:
    return [*_attention(arch), *_unaligned(arch), *_merge(arch)]


def _attention(arch: Arch) -> Iterator[KernelSpec]:
    for kv_format, heads in product(CACHE_POINTER, HEADS):
        if _served_by_fewer(arch, heads, kv_format):
            continue
        for split in (False, True):
            yield _attention_spec(arch, heads, kv_format, split=split)
        for dims in DIMS[1:] if kv_format != "fp8_ds_mla" else ():
            yield _attention_spec(arch, heads, kv_format, dims)
        yield _attention_spec(arch, heads, kv_format, dtype=torch.float16)
        tile = choose_tile(heads, kv_format, arch)
        if not (tile.wgmma and kv_format == "fp8_ds_mla"):  # spills one register in its loop
            yield _attention_spec(arch, heads, kv_format, max_logits=True)
        yield _attention_spec(arch, heads, kv_format, page=16)  # flash_mla_sparse_fwd's


def _unaligned(arch: Arch) -> Iterator[KernelSpec]:
    for kv_format, heads in product(CACHE_POINTER, HEADS):
        if unaligned_tile(heads, kv_format, arch).rows < heads:
            continue  # served by fewer
        least, *others = ALIGNMENTS[kv_format]
        for split in (False, True):
            yield _attention_spec(arch, heads, kv_format, split=split, align=least)
        for dims in DIMS[1:]:
            yield _attention_spec(arch, heads, kv_format, dims, align=least)
        yield _attention_spec(arch, heads, kv_format, dtype=torch.float16, align=least)
        yield _attention_spec(arch, heads, kv_format, max_logits=True, align=least)
        for align in others:
            yield _attention_spec(arch, heads, kv_format, align=align)


def _served_by_fewer(arch: Arch, heads: int, kv_format: str) -> bool:
    """Whether fewer heads have the same tile, which then need not be compiled again."""

    def tiles(heads: int) -> list[Tile]:
        return [choose_tile(heads, kv_format, arch, half=half) for half in (False, True)]

    return any(tiles(h) == tiles(heads) for h in HEADS if h < heads)


def _attention_spec(
    arch: Arch,
    heads: int,
    kv_format: str,
    dims: MlaDims = DIMS[0],
    *,
    split: bool = False,
    max_logits: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    page: int = BLOCK_SIZE,
    align: int = 16,
) -> KernelSpec:
    tile = choose_tile(heads, kv_format, arch, half=dtype == torch.float16)
    if align < 16:
        tile = unaligned_tile(heads, kv_format, arch)
    element = "bf16" if dtype == torch.bfloat16 else "fp16"
    cache = element if kv_format == "float" else CACHE_POINTER[kv_format]
    views = ("fp32", "bf16") if kv_format == "fp8_ds_mla" else (cache, cache)
    pointers = {
        "q_ptr": f"*{element}",
        "kv_ptr": f"*{cache}",
        "kv_scale_view_ptr": f"*{views[0]}",
        "kv_rope_view_ptr": f"*{views[1]}",
        "slots_ptr": "*i32",
        "lengths_ptr": "*i32",
        "sink_ptr": "*fp32",
        "out_ptr": f"*{element}",
        "lse_ptr": "*fp32",
        "max_logits_ptr": "*fp32",
        "part_acc_ptr": "*fp32",
        "part_sum_ptr": "*fp32",
    }
    mode = "split" if split else "max_logits" if max_logits else "whole"
    if page != BLOCK_SIZE:
        mode += f"_page{page}"
    if align < 16:
        mode += f"_align{align}"
    return KernelSpec(
        name=f"sparse/{kv_format}/{element}/{dims.kv_lora_rank}+{dims.rope_dim}/m{heads}/{mode}",
        fn=mla_sparse_kernel,
        signature={
            **pointers,
            "kv_scale": "*fp32" if kv_format == "fp8" else "fp32",
            "scale_log2": "fp32",
            **dict.fromkeys((*STRIDES, *SCALARS), "i32"),
        },
        constexprs={
            **kernel_constants(dims, kv_format, page, row_stride(dims, kv_format, align), align),
            **tile_constants(tile, arch, dims, kv_format, dtype),
            "LOAD_SCALE": kv_format == "fp8",
            "HAS_LENGTHS": split,
            "HAS_SINK": not split,
            "SPLIT": split,
            "MAX_LOGITS": max_logits,
        },
        aligned=aligned_arguments((*pointers, *STRIDES), align),
        options=tile_options(tile),
        tensor_core="native" if tile.wgmma else "any",
        quick=heads == 16 and kv_format == "float" and mode == "split",
    )


def _merge(arch: Arch) -> Iterator[KernelSpec]:
    pointers = {
        "part_acc_ptr": "*fp32",
        "part_sum_ptr": "*fp32",
        "sink_ptr": "*fp32",
        "out_ptr": "*bf16",
        "lse_ptr": "*fp32",
    }
    scalars = dict.fromkeys(("num_heads", "splits", "tiles", "share"), "i32")
    sizes = [(splits, False) for splits in (2, 4, 8, 16, 64)]
    if arch.sm == 90:
        sizes += [(splits, True) for splits in (2, 4, 16)]
    for splits, shares in sizes:
        tile = merge_tile(splits, DIMS[0].kv_lora_rank)
        yield KernelSpec(
            name=f"sparse_merge/{splits}{'_shares' if shares else ''}",
            fn=mla_sparse_merge_kernel,
            signature={**pointers, **scalars},
            constexprs={
                "DV": DIMS[0].kv_lora_rank,
                "ROWS": tile.rows,
                "COLS": tile.cols,
                "SPLITS": tile.splits,
                "HAS_SINK": True,
                "SHARES": shares,
                "PDL": arch.programmatic_launch,
            },
            aligned=tuple(pointers),
            options={"num_warps": 4, "launch_pdl": arch.programmatic_launch},
            quick=splits == 16 and not shares,
        )
