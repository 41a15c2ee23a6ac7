# SPDX-License-Identifier: Apache-2.0
"""Launching the sparse kernel and its merge. Arguments are checked by `mla_kernels.sparse.api`."""

from typing import Any

import torch
import triton

from mla_kernels import checks
from mla_kernels.arch import Arch, arch_of
from mla_kernels.decode.query import first_part, head_dim, joined
from mla_kernels.decode.rescale import scale_to_log2
from mla_kernels.decode.triton.few_rows.tiles import FewRowsTile
from mla_kernels.decode.triton.launcher import cache_sizes, kernel_constants
from mla_kernels.decode.triton.support import check_supported
from mla_kernels.layouts import Fp8DsMlaLayout, MlaDims
from mla_kernels.sparse.call import SparseCall
from mla_kernels.sparse.triton.few_rows.launcher import launch_few_rows
from mla_kernels.sparse.triton.few_rows.tiles import choose_few_rows
from mla_kernels.sparse.triton.kernel import mla_sparse_kernel
from mla_kernels.sparse.triton.results import launch_merge
from mla_kernels.sparse.triton.tiles import (
    Split,
    Tile,
    choose_tile,
    choose_turns,
    fixed_split,
    unaligned_tile,
)
from mla_kernels.triton_common.alignment import row_alignment
from mla_kernels.triton_common.formats import cache_format, cache_views, scale_argument
from mla_kernels.triton_common.launch import launch
from mla_kernels.triton_common.runtime import INTERPRET


def mla_sparse_attention_triton(
    call: SparseCall,
    *,
    deterministic: bool = False,
    tile: Tile | None = None,
    split: Split | None = None,
) -> None:
    """`mla_sparse_attention`. Allocates nothing with a workspace, but for parts of q that the
    kernel for few heads does not serve."""
    T, H, K = call.shape
    DV, dtype, device = call.out.shape[2], call.out.dtype, call.out.device
    dims = MlaDims(DV, head_dim(call.q) - DV)
    check_supported(dims, first_part(call.q).dtype)
    checks.check_last_contiguous("q", first_part(call.q))
    checks.check_contiguous("out", call.out)
    checks.check_rows_near(call.kv_cache)
    if T == 0:
        return
    kv_format = cache_format(call.kv_cache.dtype)
    arch = arch_of(device)
    chosen: Tile | FewRowsTile | None = tile
    few_rows = checks.rows_aligned(call.kv_cache) and checks.pages_near(call.kv_cache)
    few_rows = few_rows and call.max_logits is None
    if tile is None and few_rows and not INTERPRET:  # Gluon has no interpreter
        chosen = choose_few_rows(H, dims, kv_format, arch, dtype)
    chosen = chosen or choose_tile(H, kv_format, arch, half=dtype == torch.float16)
    if split is not None:
        parts = [(call, split)]
    elif deterministic:
        split = fixed_split(K)
        parts = [(part, split) for part in call.turns(split)]
    else:
        parts = call.parts(choose_turns(T, H, K, chosen, device))
    if tile is None and row_alignment(call.kv_cache) < 16 and isinstance(chosen, Tile):
        # Behind the split, so that one workspace does for all caches.
        chosen = unaligned_tile(H, kv_format, arch)
    for part, split in parts:
        launch_and_merge(part, chosen, split, dims, arch)


def launch_and_merge(
    call: SparseCall, tile: Tile | FewRowsTile, split: Split, dims: MlaDims, arch: Arch
) -> None:
    """The kernel that the tile is of, and the merge of its ranges of slots."""
    acc, sums = call.partials(split)
    if isinstance(tile, FewRowsTile):
        launch_few_rows(call, acc, sums, tile, split, arch)
    else:
        launch_sparse(call, acc, sums, tile, split, dims, arch)
    if split.splits > 1:
        launch_merge(acc, sums, call.sink, call.out, call.lse, split, call.shape[2], arch)


def launch_sparse(
    call: SparseCall,
    acc: torch.Tensor,
    sums: torch.Tensor,
    tile: Tile,
    split: Split,
    dims: MlaDims,
    arch: Arch,
) -> None:
    """One program a token, tile of its heads and range of its slots: the kernel of kernel.py."""
    T, H, K = call.shape
    q, kv_cache = joined(call.q), call.kv_cache
    kv_format = cache_format(kv_cache.dtype)
    launch(
        mla_sparse_kernel,
        (T * triton.cdiv(H, tile.rows), split.splits),
        q,
        *cache_views(kv_cache),
        scale_argument(call.kv_scale),
        *call.inputs(),
        call.out,
        call.lse,
        call.largest(split),
        acc,
        sums,
        scale_to_log2(call.scale),
        q.stride(0),
        q.stride(1),
        kv_cache.stride(0),
        call.slots.stride(0),
        kv_cache.shape[0] * kv_cache.shape[1],
        K,
        H,
        split.span,
        **kernel_constants(dims, kv_format, *cache_sizes(kv_cache)),
        **tile_constants(tile, arch, dims, kv_format, q.dtype),
        **call.modes(split),
        MAX_LOGITS=call.max_logits is not None,
        LOAD_SCALE=isinstance(call.kv_scale, torch.Tensor),
        **tile_options(tile),
    )


def tile_constants(
    tile: Tile, arch: Arch, dims: MlaDims, kv_format: str, dtype: torch.dtype
) -> dict[str, Any]:
    """Compile-time arguments that the tile and the GPU decide."""
    # fp16 holds every e4m3 value and costs half a conversion instruction. For wgmma a converted q
    # would take the registers.
    fp16_dots = kv_format == "fp8" and not tile.wgmma
    # fp16 weights have no room above the first tile's maximum.
    fixed = not fp16_dots and dtype != torch.float16
    parts = tile.parts
    if kv_format == "fp8_ds_mla":  # a part holds whole groups, and a latent of 256 has two
        parts = min(parts, Fp8DsMlaLayout(dims).num_groups)
    return {
        "BM": tile.rows,
        "BN": tile.tokens,
        "PARTS": parts,
        "REFERENCE": "first" if fixed else "lazy",
        "FP16_DOTS": fp16_dots,
        "HW_FP8": arch.e4m3_convert and not INTERPRET,
        "WGMMA": tile.wgmma,
        "STAGES": tile.stages,
        "INTERPRET": INTERPRET,
    }


def tile_options(tile: Tile) -> dict[str, int]:
    """Compiler options of the tile."""
    return {
        "num_warps": tile.warps,
        "num_stages": tile.stages,
        "maxnreg": tile.max_registers,
    }
