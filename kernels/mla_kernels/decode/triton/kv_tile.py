# SPDX-License-Identifier: Apache-2.0
"""Loading one tile of cache rows, in each cache format, as Triton device functions.

A tile is (latent [BN, DV], rope [BN, DR]) in the dtype of the dots.
"""

import triton
import triton.language as tl

from mla_kernels.triton_common.dequantize import e4m3_to_f16, scaled_e4m3
from mla_kernels.triton_common.fp8 import e4m3_to_f32
from mla_kernels.triton_common.rounding import round_to


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
def load_tile(
    kv_ptr,
    scale_ptr,
    rope_ptr,
    table_ptr,
    tile,
    length,
    page_stride,
    kv_scale,
    DTYPE: tl.constexpr,
    FORMAT: tl.constexpr,
    BN: tl.constexpr,
    DV: tl.constexpr,
    DR: tl.constexpr,
    PAGE: tl.constexpr,
    ROW: tl.constexpr,
    GROUP: tl.constexpr,
    SCALE_OFFSET: tl.constexpr,
    ROPE_OFFSET: tl.constexpr,
    HW_FP8: tl.constexpr,
    WGMMA: tl.constexpr,
):
    """(latent, rope) of one tile. page_stride and ROW (a row's stride) are in elements of kv_ptr.

    Rows at or past `length` are zeros: their bytes are never read, so that whatever lies there
    cannot reach the output (0 * NaN would).
    FORMAT "float": rows in q's dtype. "fp8": e4m3 bytes; with WGMMA times kv_scale, else in fp16 as
    they are, and the scale is the caller's business.
    "fp8_ds_mla": kv_ptr, scale_ptr and rope_ptr are uint8, fp32 and bf16 views of one cache.
    """
    start, rows = tile_rows(table_ptr, tile, length, page_stride, BN, PAGE, ROW)
    ok = (tl.arange(0, BN) < length - tile * BN)[:, None]
    dv = tl.arange(0, DV)[None, :]
    dr = tl.arange(0, DR)[None, :]
    at = rows[:, None]
    if FORMAT == "fp8_ds_mla":
        raw = tl.load(kv_ptr + start + (at + dv), mask=ok, other=0)
        scale_at = at // 4 + SCALE_OFFSET // 4 + tl.arange(0, DV // GROUP)[None, :]
        scale = tl.load(scale_ptr + start // 4 + scale_at, mask=ok, other=0)
        scale = tl.broadcast_to(scale[:, :, None], [BN, DV // GROUP, GROUP])
        latent = scaled_e4m3(raw, tl.reshape(scale, [BN, DV]), DTYPE, HW_FP8, WGMMA)
        rope_at = at // 2 + ROPE_OFFSET // 2 + dr
        rope = tl.load(rope_ptr + start // 2 + rope_at, mask=ok, other=0).to(DTYPE)
    else:
        latent = tl.load(kv_ptr + start + (at + dv), mask=ok, other=0)
        rope = tl.load(kv_ptr + start + (at + (DV + dr)), mask=ok, other=0)
        if FORMAT == "fp8":
            if WGMMA:
                latent = round_to(e4m3_to_f32(latent, HW_FP8) * kv_scale, DTYPE)
                rope = round_to(e4m3_to_f32(rope, HW_FP8) * kv_scale, DTYPE)
            else:
                latent = e4m3_to_f16(latent, HW_FP8)
                rope = e4m3_to_f16(rope, HW_FP8)
    return latent, rope
