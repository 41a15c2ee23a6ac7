# SPDX-License-Identifier: Apache-2.0
"""Gathering one tile of the cache rows that slots name, in each cache format.

FORMAT "float": rows in q's dtype. "fp8": e4m3 bytes. "fp8_ds_mla": kv_ptr, scale_ptr and rope_ptr
are uint8, fp32 and bf16 views of one cache. page_stride and ROW (a row's stride) are in elements of
kv_ptr. A slot that names no row is masked: nothing is read for it, and the tile holds zeros.
"""

import triton
import triton.language as tl

from mla_kernels.triton_common.dequantize import SCALED_BF16, SCALED_F16, SCALED_REGS, e4m3_to_f16
from mla_kernels.triton_common.fp8 import e4m3_to_f32
from mla_kernels.triton_common.rounding import round_to


@triton.jit
def load_slots(slots_ptr, start, stop, BN: tl.constexpr):
    """Slots [start, start + BN), -1 from stop on."""
    at = start + tl.arange(0, BN)
    return tl.load(slots_ptr + at, mask=at < stop, other=-1)


@triton.jit
def last_slot(slots_ptr, start, stop, num_slots, SCAN: tl.constexpr):
    """One past the last slot in [start, stop) that is in the cache; start if there is none."""
    lane = tl.arange(0, SCAN)
    found = tl.full([SCAN], 0, tl.int32) + start
    for first in range(start, stop, SCAN):
        at = first + lane
        slot = tl.load(slots_ptr + at, mask=at < stop, other=-1)
        found = tl.where((slot >= 0) & (slot < num_slots), at + 1, found)
    return tl.max(found, 0)


@triton.jit
def gather_rows(
    kv_ptr,
    scale_ptr,
    rope_ptr,
    slot,
    page_stride,
    num_slots,
    FORMAT: tl.constexpr,
    BN: tl.constexpr,
    DV: tl.constexpr,
    DR: tl.constexpr,
    PAGE: tl.constexpr,
    ROW: tl.constexpr,
    GROUP: tl.constexpr,
    SCALE_OFFSET: tl.constexpr,
    ROPE_OFFSET: tl.constexpr,
):
    """(latent [BN, DV], rope [BN, DR], scale [BN, DV // GROUP], ok [BN]) as they lie in the cache;
    latent of fp8_ds_mla is [BN, DV // GROUP, GROUP], and scale is 0 for the other formats."""
    ok = (slot >= 0) & (slot < num_slots)
    slot = tl.where(ok, slot, 0)
    start = ((slot // PAGE).to(tl.int64) * page_stride + (slot % PAGE) * ROW)[:, None]
    mask = ok[:, None]
    dv = tl.arange(0, DV)[None, :]
    dr = tl.arange(0, DR)[None, :]
    if FORMAT == "fp8_ds_mla":
        group = tl.arange(0, DV // GROUP)[None, :]
        byte = (group * GROUP)[:, :, None] + tl.arange(0, GROUP)[None, None, :]
        latent = tl.load(kv_ptr + start[:, :, None] + byte, mask=mask[:, :, None], other=0)
        scale = tl.load(scale_ptr + start // 4 + (SCALE_OFFSET // 4 + group), mask=mask, other=0)
        rope = tl.load(rope_ptr + start // 2 + (ROPE_OFFSET // 2 + dr), mask=mask, other=0)
    else:
        latent = tl.load(kv_ptr + start + dv, mask=mask, other=0)
        scale = 0.0
        rope = tl.load(kv_ptr + start + (DV + dr), mask=mask, other=0)
    return latent, rope, scale, ok


@triton.jit
def dot_operands(
    latent,
    rope,
    scale,
    kv_scale,
    FORMAT: tl.constexpr,
    DTYPE: tl.constexpr,
    FP16_DOTS: tl.constexpr,
    BN: tl.constexpr,
    DV: tl.constexpr,
    GROUP: tl.constexpr,
    HW_FP8: tl.constexpr,
):
    """(latent [BN, DV], rope [BN, DR]) in DTYPE. fp8 with FP16_DOTS stays without its scale."""
    if FORMAT == "fp8_ds_mla":
        scale = tl.broadcast_to(scale[:, :, None], [BN, DV // GROUP, GROUP])
        if HW_FP8 and DTYPE == tl.bfloat16:
            latent = tl.inline_asm_elementwise(
                SCALED_BF16, SCALED_REGS, [latent, scale], dtype=tl.bfloat16, is_pure=False, pack=4
            )
        elif HW_FP8:
            latent = tl.inline_asm_elementwise(
                SCALED_F16, SCALED_REGS, [latent, scale], dtype=tl.float16, is_pure=False, pack=4
            )
        else:
            latent = round_to(e4m3_to_f32(latent, HW_FP8) * scale, DTYPE)
        latent = tl.reshape(latent, [BN, DV])
        rope = rope.to(DTYPE)
    elif FORMAT == "fp8":
        if FP16_DOTS:
            latent = e4m3_to_f16(latent, HW_FP8)
            rope = e4m3_to_f16(rope, HW_FP8)
        else:
            latent = round_to(e4m3_to_f32(latent, HW_FP8) * kv_scale, DTYPE)
            rope = round_to(e4m3_to_f32(rope, HW_FP8) * kv_scale, DTYPE)
    return latent, rope
