# SPDX-License-Identifier: Apache-2.0
"""Indexer cache write: one program quantises one token's key."""

import triton
import triton.language as tl

from mla_kernels import layouts
from mla_kernels.triton_common.fp8 import f32_to_e4m3
from mla_kernels.triton_common.rounding import round_to

E4M3_MAX = tl.constexpr(layouts.E4M3_MAX)
MIN_AMAX = tl.constexpr(layouts.INDEXER_MIN_AMAX)


@triton.jit
def write_indexer_cache_kernel(
    k_ptr,  # [T, D]
    cache_ptr,  # [num_blocks, PAGE, D + 4] uint8 or [num_blocks, PAGE, D] bf16
    slots_ptr,  # [T] int32 or int64
    stride_k,
    stride_page,
    D: tl.constexpr,
    D_POW2: tl.constexpr,
    PAGE: tl.constexpr,
    FP8: tl.constexpr,
    UE8M0: tl.constexpr,
    FP8_HARDWARE: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    if slot >= 0:
        d = tl.arange(0, D_POW2)
        k = tl.load(k_ptr + token * stride_k + d, mask=d < D, other=0.0).to(tl.float32)
        page_ptr = cache_ptr + (slot // PAGE) * stride_page
        offset = slot % PAGE
        if FP8:
            amax = tl.max(tl.where(k == k, tl.abs(k), 0.0), axis=0)
            # div_rn: the plain division of the GPU is 2 ulp off, which can move a rounding.
            scale = tl.math.div_rn(tl.maximum(amax, MIN_AMAX), E4M3_MAX)
            if UE8M0:  # up to a power of two: the mantissa bits go
                bits = scale.to(tl.int32, bitcast=True)
                scale = ((bits + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
            codes = f32_to_e4m3(tl.math.div_rn(k, scale), FP8_HARDWARE)
            tl.store(page_ptr + offset * D + d, codes, mask=d < D)
            scale_ptr = (page_ptr + PAGE * D).to(tl.pointer_type(tl.float32), bitcast=True)
            tl.store(scale_ptr + offset, scale)
        else:
            tl.store(page_ptr + offset * D + d, round_to(k, tl.bfloat16), mask=d < D)
