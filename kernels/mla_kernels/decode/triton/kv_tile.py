# SPDX-License-Identifier: Apache-2.0
"""Loading one tile of cache rows, in each cache format, as Triton device functions.

A tile as it lies in the cache is (latent [BN, DV], rope [BN, DR], scale [BN, DV // GROUP]);
FORMAT "float": rows in q's dtype. "fp8": e4m3 bytes. "fp8_ds_mla": e4m3 latent, fp32 scales and
bf16 rope, and kv_ptr, scale_ptr and rope_ptr are uint8, fp32 and bf16 views of one cache. Without
scales, `scale` is 0.

page_stride and ROW (a row's stride) are in elements of kv_ptr. ALIGN: alignment.row_alignment.
"""

import triton
import triton.language as tl

from mla_kernels.triton_common.alignment import row_pointers
from mla_kernels.triton_common.dequantize import e4m3_to_f16, scaled_e4m3
from mla_kernels.triton_common.fp8 import e4m3_to_f32
from mla_kernels.triton_common.rounding import round_to

# One thread asks the L2 for a range of memory. $0 is no result, only what the syntax wants.
PREFETCH_L2 = tl.constexpr(
    """{
    .reg .pred first;
    .reg .u32 thread;
    mov.u32 thread, %tid.x;
    setp.eq.u32 first, thread, 0;
    @first cp.async.bulk.prefetch.L2.global [$1], $2;
    mov.u32 $0, 0;
    }"""
)


@triton.jit
def tile_rows(
    table_ptr, tile, length, page_stride, BN: tl.constexpr, PAGE: tl.constexpr, ROW: tl.constexpr
):
    """(start, rows): element offsets of a tile's BN rows as int64 start + rows [BN].

    A tile within one page has one 64-bit start and constant 32-bit rows, which cost no registers.
    """
    lane = tl.arange(0, BN)
    if PAGE % BN == 0:
        first = tile * BN
        page = tl.load(table_ptr + first // PAGE).to(tl.int64)
        return page * page_stride + (first % PAGE) * ROW, lane * ROW
    else:
        token = tile * BN + lane
        page = tl.load(table_ptr + token // PAGE, mask=token < length, other=0).to(tl.int64)
        return 0, page * page_stride + (token % PAGE) * ROW


@triton.jit
def load_rows(
    kv_ptr,
    scale_ptr,
    rope_ptr,
    start,
    rows,
    left,
    FORMAT: tl.constexpr,
    BN: tl.constexpr,
    DV: tl.constexpr,
    DR: tl.constexpr,
    GROUP: tl.constexpr,
    SCALE_OFFSET: tl.constexpr,
    ROPE_OFFSET: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """(latent, rope, scale) as they lie in the cache, at the offsets that tile_rows gave.

    Rows at or past `left` are zeros: their bytes are never read, so that whatever lies there
    cannot reach the output (0 * NaN would).
    """
    ok = (tl.arange(0, BN) < left)[:, None]
    dv = tl.arange(0, DV)[None, :]
    dr = tl.arange(0, DR)[None, :]
    at = rows[:, None]
    if FORMAT == "fp8_ds_mla":
        group = tl.arange(0, DV // GROUP)[None, :, None] * GROUP
        byte = at[:, :, None] + (group + tl.arange(0, GROUP)[None, None, :])
        latent = tl.load(row_pointers(kv_ptr, start, ALIGN) + byte, mask=ok[:, :, None], other=0)
        scale_at = at // 4 + SCALE_OFFSET // 4 + tl.arange(0, DV // GROUP)[None, :]
        scale = tl.load(row_pointers(scale_ptr, start // 4, ALIGN) + scale_at, mask=ok, other=0)
        rope_at = at // 2 + ROPE_OFFSET // 2 + dr
        rope = tl.load(row_pointers(rope_ptr, start // 2, ALIGN) + rope_at, mask=ok, other=0)
    else:
        first = row_pointers(kv_ptr, start, ALIGN)
        latent = tl.load(first + (at + dv), mask=ok, other=0)
        scale = 0.0
        rope = tl.load(first + (at + (DV + dr)), mask=ok, other=0)
    return latent, rope, scale


@triton.jit
def latent_operand(
    latent,
    scale,
    kv_scale,
    DTYPE: tl.constexpr,
    FORMAT: tl.constexpr,
    FP16_DOTS: tl.constexpr,
    BN: tl.constexpr,
    DV: tl.constexpr,
    GROUP: tl.constexpr,
    HW_FP8: tl.constexpr,
    PIN: tl.constexpr,
):
    """The latent in the dtype of the dots. fp8 with FP16_DOTS stays without its scale."""
    if FORMAT == "fp8_ds_mla":
        scale = tl.broadcast_to(scale[:, :, None], [BN, DV // GROUP, GROUP])
        return tl.reshape(scaled_e4m3(latent, scale, DTYPE, HW_FP8, PIN), [BN, DV])
    elif FORMAT == "float":
        return latent
    elif FP16_DOTS:
        return e4m3_to_f16(latent, HW_FP8)
    else:
        return round_to(e4m3_to_f32(latent, HW_FP8) * kv_scale, DTYPE)


@triton.jit
def rope_operand(
    rope,
    kv_scale,
    DTYPE: tl.constexpr,
    FORMAT: tl.constexpr,
    FP16_DOTS: tl.constexpr,
    HW_FP8: tl.constexpr,
    IN_REGISTERS: tl.constexpr,
):
    """The rope part likewise."""
    if FORMAT == "fp8":
        if FP16_DOTS:
            return e4m3_to_f16(rope, HW_FP8)
        else:
            return round_to(e4m3_to_f32(rope, HW_FP8) * kv_scale, DTYPE)
    elif IN_REGISTERS:
        return in_registers(rope.to(DTYPE))
    else:
        return rope.to(DTYPE)


@triton.jit
def in_registers(x):
    """x, 16 bits wide, as something that is no load: wgmma then takes it from registers.

    In shared memory its place would next be that of P, and ptxas 12.8 takes a wrong address for
    two wgmma operands of one place.
    """
    return tl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=2
    )


@triton.jit
def prefetch_tile(
    kv_ptr,
    page,
    tile,
    page_stride,
    BN: tl.constexpr,
    DV: tl.constexpr,
    DR: tl.constexpr,
    PAGE: tl.constexpr,
    ROW: tl.constexpr,
):
    """Ask for a tile to be in the L2 before its rows are loaded. It lies within `page`."""
    BITS: tl.constexpr = kv_ptr.dtype.element_ty.primitive_bitwidth
    at = kv_ptr + page.to(tl.int64) * page_stride + ((tile * BN) % PAGE) * ROW
    size = tl.full([], ((BN - 1) * ROW + DV + DR) * BITS // 8, tl.int32)
    tl.inline_asm_elementwise(
        PREFETCH_L2, "=r,l,r", [at, size], dtype=tl.int32, is_pure=False, pack=1
    )
