# SPDX-License-Identifier: Apache-2.0
"""Rotation of the query and append of the new cache row of a decode step, in one kernel.

Program (request, 0) writes the cache row; program (request, 1 + i) rotates the i-th HEADS heads.
"""

import triton
import triton.language as tl

from mla_kernels.cache.triton.row import store_row
from mla_kernels.triton_common.rounding import round_to


@triton.jit
def rotated(x_ptr, table_ptr, i, mask, DR: tl.constexpr):
    """Elements i of the rotated vectors at x_ptr, fp32; the table row: DR/2 cosines, DR/2 sines."""
    HALF: tl.constexpr = DR // 2
    first = i < HALF
    x = tl.load(x_ptr + i, mask=mask, other=0.0).to(tl.float32)
    partner = tl.load(x_ptr + tl.where(first, i + HALF, i - HALF), mask=mask, other=0.0)
    partner = partner.to(tl.float32)
    cos = tl.load(table_ptr + i % HALF)
    sin = tl.load(table_ptr + HALF + i % HALF)
    return x * cos + tl.where(first, -partner, partner) * sin


@triton.jit
def rotate_and_append_kernel(
    q_up_ptr,  # [B, H, NOPE + DR]
    q_ptr,  # [B, 1, H, DV + DR]
    down_ptr,  # [B, Q_LORA + DV + DR]
    table_ptr,  # [positions, DR] fp32
    cache_ptr,  # [num_blocks, PAGE, row]; uint8 for the two fp8 layouts
    block_table_ptr,  # [B, max_blocks] int32
    lens_ptr,  # [B] int32
    kv_scale,  # fp32 or a pointer to one
    num_heads,
    page_stride,
    row_stride,
    block_table_stride,
    HEADS: tl.constexpr,
    NOPE: tl.constexpr,
    Q_LORA: tl.constexpr,
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
    request = tl.program_id(0).to(tl.int64)
    length = tl.load(lens_ptr + request)
    position = tl.maximum(length - 1, 0).to(tl.int64)
    angles = table_ptr + position * DR
    dr = tl.arange(0, BLOCK_DR)
    if tl.program_id(1) > 0:
        head = (tl.program_id(1) - 1) * HEADS + tl.arange(0, HEADS)
        mask = (head < num_heads)[:, None] & (dr < DR)[None, :]
        row = (request * num_heads + head)[:, None]
        i = dr[None, :] % DR
        q = rotated(q_up_ptr + row * (NOPE + DR) + NOPE, angles, i, mask, DR)
        q = round_to(q, q_ptr.dtype.element_ty)
        tl.store(q_ptr + row * (DV + DR) + DV + dr[None, :], q, mask=mask)
    elif length > 0:
        scale = tl.load(kv_scale) if LOAD_SCALE else kv_scale
        dv = tl.arange(0, BLOCK_DV)
        new = down_ptr + request * (Q_LORA + DV + DR) + Q_LORA
        latent = tl.load(new + dv, mask=dv < DV, other=0.0)
        rope = rotated(new + DV, angles, dr % DR, dr < DR, DR)
        page = tl.load(block_table_ptr + request * block_table_stride + position // PAGE)
        store_row(
            latent.to(tl.float32),
            rope,
            cache_ptr + page.to(tl.int64) * page_stride + (position % PAGE) * row_stride,
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
