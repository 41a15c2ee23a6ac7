# SPDX-License-Identifier: Apache-2.0
"""Launching the few-rows sparse kernel. Arguments are checked by `mla_kernels.sparse.api`."""

from typing import Any

import torch
import triton

from mla_kernels.arch import Arch
from mla_kernels.decode.query import both_parts
from mla_kernels.decode.rescale import scale_to_log2
from mla_kernels.decode.triton.few_rows.tiles import FewRowsTile
from mla_kernels.layouts import Fp8DsMlaLayout, MlaDims
from mla_kernels.sparse.call import SparseCall
from mla_kernels.sparse.triton.few_rows.kernel import few_rows_sparse_kernel
from mla_kernels.sparse.triton.tiles import Split
from mla_kernels.triton_common.launch import launch


def launch_few_rows(
    call: SparseCall,
    acc: torch.Tensor,
    sums: torch.Tensor,
    tile: FewRowsTile,
    split: Split,
    arch: Arch,
) -> None:
    """One program a token, tile of its heads and range of its slots."""
    T, H, K = call.shape
    kv_cache = call.kv_cache
    latent, rope = both_parts(call.q, call.out.shape[2])
    units = kv_cache.view(torch.bfloat16)
    launch(
        few_rows_sparse_kernel,
        (T * triton.cdiv(H, tile.rows), split.splits),
        latent,
        rope,
        units,
        kv_cache.view(torch.float32),
        *call.inputs(),
        call.out,
        call.lse,
        acc,
        sums,
        scale_to_log2(call.scale),
        latent.stride(0),
        latent.stride(1),
        rope.stride(0),
        rope.stride(1),
        units.stride(0) // 8,
        call.slots.stride(0),
        kv_cache.shape[0] * kv_cache.shape[1],
        K,
        H,
        split.span,
        **tile_constants(tile, kv_cache.shape[1], units.stride(1)),
        **call.modes(split),
        PDL=arch.programmatic_launch,
        num_warps=tile.warps,
        maxnreg=tile.max_registers,
    )


def tile_constants(tile: FewRowsTile, page: int, row: int) -> dict[str, Any]:
    """Compile-time arguments that tile and cache decide; `row` in 16-bit units."""
    layout = Fp8DsMlaLayout()
    return {
        "BM": tile.rows,
        "BN": tile.tokens,
        "DV": MlaDims().kv_lora_rank,
        "DR": MlaDims().rope_dim,
        "PAGE": page,
        "ROW": row,
        "SCALE_OFFSET": layout.scale_offset // 4,
        "ROPE_OFFSET": layout.rope_offset // 2,
        "WARPS": tile.warps,
        "STAGES": tile.stages,
    }
