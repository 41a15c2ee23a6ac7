# SPDX-License-Identifier: Apache-2.0
"""Launching the cache write kernel. Arguments are checked by `mla_kernels.cache.api`."""

from functools import cache
from typing import Any

import torch
import triton

from mla_kernels.arch import device_arch
from mla_kernels.cache.triton.kernel import write_kv_cache_kernel
from mla_kernels.layouts import Fp8DsMlaLayout, MlaDims
from mla_kernels.triton_common.formats import byte_view, cache_format, scale_argument
from mla_kernels.triton_common.launch import launch
from mla_kernels.triton_common.runtime import INTERPRET

NUM_WARPS = 2  # 64 lanes x 16 bytes cover a bf16 latent of 512


def launch_write_kv_cache(
    kv_c: torch.Tensor,
    k_pe: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    kv_scale: float | torch.Tensor | None = None,
) -> None:
    """Write kv_c [T, kv_lora_rank] and k_pe [T, rope] to the rows `slot_mapping` names, in place.

    The last dimension of every tensor is contiguous; other strides are free. kv_scale is needed
    for a float8_e4m3fn cache only.
    """
    tokens = slot_mapping.shape[0]
    if tokens == 0:
        return
    launch(
        write_kv_cache_kernel,
        (tokens,),
        kv_c,
        k_pe,
        byte_view(kv_cache),
        slot_mapping,
        scale_argument(kv_scale),
        kv_c.stride(0),
        k_pe.stride(0),
        kv_cache.stride(0),
        kv_cache.stride(1),
        PAGE=kv_cache.shape[1],
        LOAD_SCALE=isinstance(kv_scale, torch.Tensor),
        **row_constants(MlaDims(kv_c.shape[1], k_pe.shape[1]), cache_format(kv_cache.dtype)),
        HW_FP8=not INTERPRET and device_arch(kv_cache.device).e4m3_convert,
        num_warps=NUM_WARPS,
    )


@cache
def row_constants(dims: MlaDims, kv_format: str) -> dict[str, Any]:
    """The compile-time arguments of `store_row` that describe a row."""
    layout = Fp8DsMlaLayout(dims)
    return {
        "DV": dims.kv_lora_rank,
        "DR": dims.rope_dim,
        "BLOCK_DV": triton.next_power_of_2(dims.kv_lora_rank),
        "BLOCK_DR": triton.next_power_of_2(dims.rope_dim),
        "FORMAT": kv_format,
        "GROUP": layout.group_size,
        "SCALE_OFFSET": layout.scale_offset,
        "ROPE_OFFSET": layout.rope_offset,
    }
