# SPDX-License-Identifier: Apache-2.0
"""Gathering one tile of the cache rows that slots name, in each cache format.

FORMAT "float": rows in q's dtype. "fp8": e4m3 bytes. "fp8_ds_mla": kv_ptr, scale_ptr and rope_ptr
are uint8, fp32 and bf16 views of one cache. page_stride and ROW (a row's stride) are in elements of
kv_ptr; ALIGN is alignment.row_alignment. A slot that names no row is masked: nothing is read for
it, and the tile holds zeros.
"""

import triton
import triton.language as tl

from mla_kernels.triton_common.alignment import row_pointers
from mla_kernels.triton_common.dequantize import e4m3_to_f16, scaled_e4m3
from mla_kernels.triton_common.fp8 import e4m3_to_f32
from mla_kernels.triton_common.rounding import round_to


@triton.jit
def appended(items, x):
    """The tuple with one more item."""
    items += (x,)
    return items


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
def slot_rows(slot, page_stride, num_slots, PAGE: tl.constexpr, ROW: tl.constexpr):
    """(row, ok): the offset of each slot's row, int64, and whether it is in the cache."""
    ok = (slot >= 0) & (slot < num_slots)
    slot = tl.where(ok, slot, 0)
    return (slot // PAGE).to(tl.int64) * page_stride + (slot % PAGE) * ROW, ok


@triton.jit
def load_part(
    kv_ptr,
    scale_ptr,
    row,
    ok,
    part,
    FORMAT: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUP: tl.constexpr,
    SCALE_OFFSET: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """(latent, scale): WIDTH dimensions from part * WIDTH on of each row, as they lie in the cache.

    fp8_ds_mla in groups: [BN, WIDTH // GROUP, GROUP] and [BN, WIDTH // GROUP]; else [BN, WIDTH].
    """
    if FORMAT == "fp8_ds_mla":
        group = part * (WIDTH // GROUP) + tl.arange(0, WIDTH // GROUP)[None, :]
        byte = (group * GROUP)[:, :, None] + tl.arange(0, GROUP)[None, None, :]
        latent_at = row_pointers(kv_ptr, row[:, None, None], ALIGN) + byte
        latent = tl.load(latent_at, mask=ok[:, None, None], other=0)
        scale_at = row_pointers(scale_ptr, row[:, None] // 4, ALIGN) + (SCALE_OFFSET // 4 + group)
        return latent, tl.load(scale_at, mask=ok[:, None], other=0)
    else:
        column = part * WIDTH + tl.arange(0, WIDTH)[None, :]
        latent_at = row_pointers(kv_ptr, row[:, None], ALIGN) + column
        return tl.load(latent_at, mask=ok[:, None], other=0), 0.0


@triton.jit
def load_rope(
    kv_ptr,
    rope_ptr,
    row,
    ok,
    FORMAT: tl.constexpr,
    DV: tl.constexpr,
    DR: tl.constexpr,
    ROPE_OFFSET: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """[BN, DR] as it lies in the cache."""
    column = tl.arange(0, DR)[None, :]
    if FORMAT == "fp8_ds_mla":
        at = row_pointers(rope_ptr, row[:, None] // 2, ALIGN) + (ROPE_OFFSET // 2 + column)
    else:
        at = row_pointers(kv_ptr, row[:, None], ALIGN) + (DV + column)
    return tl.load(at, mask=ok[:, None], other=0)


@triton.jit
def as_operand(
    x,
    kv_scale,
    FORMAT: tl.constexpr,
    DTYPE: tl.constexpr,
    FP16_DOTS: tl.constexpr,
    HW_FP8: tl.constexpr,
):
    """A tile in DTYPE. fp8 with FP16_DOTS stays without its scale."""
    if FORMAT != "fp8":
        return x.to(DTYPE)
    elif FP16_DOTS:
        return e4m3_to_f16(x, HW_FP8)
    else:
        return round_to(e4m3_to_f32(x, HW_FP8) * kv_scale, DTYPE)


@triton.jit
def scaled_groups(
    code, scale, DTYPE: tl.constexpr, BN: tl.constexpr, WIDTH: tl.constexpr, HW_FP8: tl.constexpr
):
    """fp8_ds_mla's (latent, scale) of load_part -> [BN, WIDTH] in DTYPE, rounded once."""
    scale = tl.broadcast_to(scale[:, :, None], code.shape)
    return tl.reshape(scaled_e4m3(code, scale, DTYPE, HW_FP8, True), [BN, WIDTH])
