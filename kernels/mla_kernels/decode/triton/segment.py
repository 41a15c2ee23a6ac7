# SPDX-License-Identifier: Apache-2.0
"""A range of one request's cache tiles against one tile of query rows, as device functions."""

import triton
import triton.language as tl

from mla_kernels import numerics
from mla_kernels.decode.triton.kv_tile import load_tile
from mla_kernels.decode.triton.softmax import finish, rescale, token_sum
from mla_kernels.decode.triton.tile_step import add_values, dot, tile_weights
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
    CAUSAL: tl.constexpr,
    RESCALE: tl.constexpr,
    REFERENCE: tl.constexpr,
    LAZY_BRANCH: tl.constexpr,
    ORDER: tl.constexpr,
    DTYPE: tl.constexpr,
    HW_FP8: tl.constexpr,
    WGMMA: tl.constexpr,
    STAGES: tl.constexpr,
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
    for i in tl.range(tile, stop, num_stages=STAGES):
        latent, rope = load_tile(
            kv_ptr, kv_scale_view_ptr, kv_rope_view_ptr, table, i, length, page_stride,
            kv_scale, DTYPE, FORMAT, BN, DV, DR, PAGE, ROW, GROUP, SCALE_OFFSET, ROPE_OFFSET,
            HW_FP8, WGMMA,
        )  # fmt: skip
        k_old = k
        p, k, l = tile_weights(
            q, q_rope, latent, rope, q_ptr, row_scale, k, l, limit - i * BN, i < refresh, num_heads,
            BM, BN, CAUSAL, ORDER, RESCALE, REFERENCE, DTYPE, WGMMA, INTERPRET,
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
        seen = l > 0.0
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
