# SPDX-License-Identifier: Apache-2.0
"""Launching the few-rows kernel. Arguments are checked by `mla_kernels.decode.api`."""

from typing import Any

import torch
import triton

from mla_kernels.arch import Arch
from mla_kernels.decode.call import DecodeCall
from mla_kernels.decode.query import joined
from mla_kernels.decode.rescale import scale_to_log2
from mla_kernels.decode.triton.few_rows.kernel import few_rows_kernel
from mla_kernels.decode.triton.few_rows.tiles import FewRowsTile
from mla_kernels.layouts import Fp8DsMlaLayout, MlaDims
from mla_kernels.triton_common.formats import cache_format, scale_argument
from mla_kernels.triton_common.launch import launch


def launch_few_rows(call: DecodeCall, tile: FewRowsTile, dims: MlaDims, arch: Arch) -> None:
    """One program a row tile and part of the plan. Cache rows start at multiples of 16 bytes, as
    asynchronous copies want."""
    q, kv_cache = joined(call.q), call.kv_cache
    kv_format = cache_format(kv_cache.dtype)
    units = kv_cache.view(torch.bfloat16 if kv_format == "fp8_ds_mla" else q.dtype)
    launch(
        few_rows_kernel,
        (triton.cdiv(call.rows, tile.rows), call.plan.parts.shape[0]),
        q,
        units,
        kv_cache.view(torch.float32) if kv_format == "fp8_ds_mla" else units,
        scale_argument(call.kv_scale),
        *call.tables(),
        *call.results(),
        scale_to_log2(call.scale),
        q.stride(0),
        q.stride(1),
        q.stride(2),
        units.stride(0) // 8,
        *call.sizes(),
        **kernel_constants(tile, arch, dims, kv_format, kv_cache.shape[1], units.stride(1)),
        **call.modes(),
        LOAD_SCALE=isinstance(call.kv_scale, torch.Tensor),
        num_warps=tile.warps,
        maxnreg=tile.max_registers,
    )


def kernel_constants(
    tile: FewRowsTile, arch: Arch, dims: MlaDims, kv_format: str, page: int, row: int
) -> dict[str, Any]:
    """Compile-time arguments that tile, GPU and cache decide; `row` in 16-bit units."""
    layout = Fp8DsMlaLayout(dims)
    rope = {
        "float": dims.kv_lora_rank,
        "fp8": dims.kv_lora_rank // 2,
        "fp8_ds_mla": layout.rope_offset // 2,
    }
    return {
        "BM": tile.rows,
        "BN": tile.tokens,
        "DV": dims.kv_lora_rank,
        "DR": dims.rope_dim,
        "PAGE": page,
        "ROW": row,
        "FORMAT": kv_format,
        "SCALE_OFFSET": layout.scale_offset // 4,
        "ROPE_OFFSET": rope[kv_format],
        "WARPS": tile.warps,
        "STAGES": tile.stages,
        "PDL": arch.programmatic_launch,
    }
