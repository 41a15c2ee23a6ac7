# SPDX-License-Identifier: Apache-2.0
"""The cache write kernel: one program joins and quantises one token's latent and rope parts."""

import triton
import triton.language as tl

from mla_kernels.cache.triton.row import store_row


@triton.jit
def write_kv_cache_kernel(
    kv_c_ptr,  # [T, DV]
    k_pe_ptr,  # [T, DR]
    cache_ptr,  # [num_blocks, PAGE, row]; uint8 for the two fp8 layouts
    slots_ptr,  # [T] int32 or int64
    kv_scale,  # fp32 or a pointer to one
    kv_c_stride,
    k_pe_stride,
    page_stride,
    row_stride,
    PAGE: tl.constexpr,
    DV: tl.constexpr,
    DR: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_DR: tl.constexpr,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    SCALE_OFFSET: tl.constexpr,
    ROPE_OFFSET: tl.constexpr,
    LOAD_SCALE: tl.constexpr,
    HW_FP8: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    if slot >= 0:
        scale = tl.load(kv_scale) if LOAD_SCALE else kv_scale
        dv = tl.arange(0, BLOCK_DV)
        dr = tl.arange(0, BLOCK_DR)
        latent = tl.load(kv_c_ptr + token * kv_c_stride + dv, mask=dv < DV, other=0.0)
        rope = tl.load(k_pe_ptr + token * k_pe_stride + dr, mask=dr < DR, other=0.0)
        store_row(
            latent.to(tl.float32),
            rope.to(tl.float32),
            cache_ptr + (slot // PAGE) * page_stride + (slot % PAGE) * row_stride,
            scale,
            DV,
            DR,
            BLOCK_DV,
            BLOCK_DR,
            FORMAT,
            GROUP,
            SCALE_OFFSET,
            ROPE_OFFSET,
            HW_FP8,
        )
