# SPDX-License-Identifier: Apache-2.0
"""A range of one request's cache tiles against one tile of query rows, as device functions."""

import triton
import triton.language as tl

from mla_kernels import numerics
from mla_kernels.decode.triton.kv_tile import (
    latent_operand,
    load_rows,
    prefetch_tile,
    rope_operand,
    tile_rows,
)
from mla_kernels.decode.triton.softmax import finish, rescale, token_sum
from mla_kernels.decode.triton.tile_step import add_values, dot, tile_scores, tile_weights
from mla_kernels.triton_common.rounding import round_to

LN2 = tl.constexpr(numerics.LN2)


@triton.jit
def attend(
    q,
    q_rope,
    q_ptr,
    row_scale,
    kv_ptr,
    kv_scale_view_ptr,
    kv_rope_view_ptr,
    table,
    page_stride,
    kv_scale,
    tile,
    stop,
    length,
    limit,
    k,
    refresh,
    num_heads,
    BM: tl.constexpr,
    BN: tl.constexpr,
    DV: tl.constexpr,
    DR: tl.constexpr,
    PAGE: tl.constexpr,
    ROW: tl.constexpr,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    SCALE_OFFSET: tl.constexpr,
    ROPE_OFFSET: tl.constexpr,
    ALIGN: tl.constexpr,
    CAUSAL: tl.constexpr,
    RESCALE: tl.constexpr,
    REFERENCE: tl.constexpr,
    LAZY_BRANCH: tl.constexpr,
    ORDER: tl.constexpr,
    DTYPE: tl.constexpr,
    FP16_DOTS: tl.constexpr,
    HW_FP8: tl.constexpr,
    WGMMA: tl.constexpr,
    WARPS: tl.constexpr,
    STAGES: tl.constexpr,
    CARRY: tl.constexpr,
    PREFETCH: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """(O, k, l) over the tiles [tile, stop). Row r sees keys below limit[r] (or the scalar limit).

    k is the reference to start from; with REFERENCE "first" only tiles before `refresh` raise it.
    """
    O0: tl.constexpr = DV if ORDER == "tokens" else BM
    O1: tl.constexpr = BM if ORDER == "tokens" else DV
    T0: tl.constexpr = BN if ORDER == "tokens" else BM
    T1: tl.constexpr = BM if ORDER == "tokens" else BN
    # Row sums by a dot with ones, where they would take registers from O.
    SUM_BY_DOT: tl.constexpr = WGMMA and ORDER == "rows" and REFERENCE == "first"
    l = tl.zeros([BM], tl.float32)
    acc = tl.zeros([O0, O1], tl.float32)
    if SUM_BY_DOT:
        weight = tl.zeros([BM, 16], tl.float32)
    elif REFERENCE == "first":
        weight = tl.zeros([T0, T1], tl.float32)
    SPLIT: tl.constexpr = WGMMA and WARPS > 4
    # With more stages it has a place of its own in shared memory.
    ROPE_IN_REGISTERS: tl.constexpr = STAGES == 1 and ORDER == "tokens" and not INTERPRET
    PIN: tl.constexpr = not WGMMA or ORDER == "tokens"
    if CARRY:
        start, rows = tile_rows(table, tile, length, page_stride, BN, PAGE, ROW)
        raw, raw_rope, scale = load_rows(
            kv_ptr, kv_scale_view_ptr, kv_rope_view_ptr, start, rows, length - tile * BN,
            FORMAT, BN, DV, DR, GROUP, SCALE_OFFSET, ROPE_OFFSET, ALIGN,
        )  # fmt: skip
        latent = latent_operand(
            raw, scale, kv_scale, DTYPE, FORMAT, FP16_DOTS, BN, DV, GROUP, HW_FP8, PIN
        )
        following = tl.minimum(tile + 1, stop - 1)
        start, rows = tile_rows(table, following, length, page_stride, BN, PAGE, ROW)
    if PREFETCH > 0:
        far = tl.minimum(tile + PREFETCH, stop - 1)
        far_page = tl.load(table + far * BN // PAGE)
    for i in tl.range(tile, stop, num_stages=STAGES):
        if PREFETCH > 0:
            prefetch_tile(kv_ptr, far_page, far, page_stride, BN, DV, DR, PAGE, ROW)
            far = tl.minimum(i + 1 + PREFETCH, stop - 1)
            far_page = tl.load(table + far * BN // PAGE)
        if not CARRY:
            start, rows = tile_rows(table, i, length, page_stride, BN, PAGE, ROW)
            raw, raw_rope, scale = load_rows(
                kv_ptr, kv_scale_view_ptr, kv_rope_view_ptr, start, rows, length - i * BN,
                FORMAT, BN, DV, DR, GROUP, SCALE_OFFSET, ROPE_OFFSET, ALIGN,
            )  # fmt: skip
            latent = latent_operand(
                raw, scale, kv_scale, DTYPE, FORMAT, FP16_DOTS, BN, DV, GROUP, HW_FP8, PIN
            )
        rope = rope_operand(raw_rope, kv_scale, DTYPE, FORMAT, FP16_DOTS, HW_FP8, ROPE_IN_REGISTERS)
        k_old = k
        qk = tile_scores(q, q_rope, latent, rope, BM, BN, ORDER, SPLIT, INTERPRET)
        if CARRY:
            raw, raw_rope, scale = load_rows(
                kv_ptr, kv_scale_view_ptr, kv_rope_view_ptr, start, rows,
                length - following * BN,
                FORMAT, BN, DV, DR, GROUP, SCALE_OFFSET, ROPE_OFFSET, ALIGN,
            )  # fmt: skip
            following = tl.minimum(i + 2, stop - 1)
            start, rows = tile_rows(table, following, length, page_stride, BN, PAGE, ROW)
        p, k, l = tile_weights(
            qk, q_ptr, row_scale, k, l, limit - i * BN, i < refresh, num_heads,
            BM, BN, CAUSAL, ORDER, RESCALE, REFERENCE, DTYPE, WGMMA, SPLIT, INTERPRET,
        )  # fmt: skip
        if REFERENCE == "lazy":
            if LAZY_BRANCH:
                if tl.max((k != k_old).to(tl.int32), 0) != 0:
                    acc = rescale(acc, k_old, k, DTYPE, RESCALE, ORDER)
            else:
                acc = rescale(acc, k_old, k, DTYPE, RESCALE, ORDER)
        elif SUM_BY_DOT:
            ones = tl.full([BN, 16], 1.0, tl.float32).to(DTYPE)
            weight = dot(p, ones, weight, INTERPRET)
        else:
            weight += p.to(tl.float32)
        acc = add_values(p, latent, acc, ORDER, INTERPRET)
        if CARRY:
            latent = latent_operand(
                raw, scale, kv_scale, DTYPE, FORMAT, FP16_DOTS, BN, DV, GROUP, HW_FP8, PIN
            )
    if REFERENCE == "first":
        if SUM_BY_DOT:
            l = tl.max(weight, 1)
        else:
            l = token_sum(weight, ORDER)
    return acc, k, l


@triton.jit
def write_segment(
    acc,
    k,
    l,
    v_scale,
    out_ptr,
    lse_ptr,
    part_acc_ptr,
    part_sum_ptr,
    request,
    splits,
    slot,
    row,
    row_ok,
    num_rows,
    DV: tl.constexpr,
    DTYPE: tl.constexpr,
    RESCALE: tl.constexpr,
    ORDER: tl.constexpr,
):
    """A whole request (splits == 1) to out and lse; part of one to its slot of the workspace."""
    o = finish(acc, k, DTYPE, RESCALE, ORDER) * v_scale
    if ORDER == "tokens":
        rows_o = tl.trans(o)
    else:
        rows_o = o
    dv = tl.arange(0, DV)[None, :]
    mask = row_ok[:, None]
    if splits == 1:
        at = request.to(tl.int64) * num_rows + row
        seen = l != 0.0  # NaN too
        result = rows_o * tl.where(seen, 1.0 / l, 0.0)[:, None]
        tl.store(
            out_ptr + at[:, None] * DV + dv, round_to(result, out_ptr.dtype.element_ty), mask=mask
        )
        lse = tl.where(seen, (k + tl.log2(l)) * LN2, -float("inf"))
        tl.store(lse_ptr + at, lse, mask=row_ok)
    else:
        at = slot.to(tl.int64) * num_rows + row
        tl.store(part_acc_ptr + at[:, None] * DV + dv, rows_o, mask=mask)
        tl.store(part_sum_ptr + at * 2, l, mask=row_ok)
        tl.store(part_sum_ptr + at * 2 + 1, k, mask=row_ok)
