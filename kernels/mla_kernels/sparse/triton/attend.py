# SPDX-License-Identifier: Apache-2.0
"""One range of a token's slots against one tile of its heads, as a Triton device function.

Scores, weights and values of a tile are the dense kernel's (decode/triton).
"""

import triton
import triton.language as tl

from mla_kernels.decode.triton.softmax import rescale, scaled_scores, token_sum
from mla_kernels.decode.triton.tile_step import add_values, dot, scores, weights_of_scores
from mla_kernels.sparse.triton.gather import dot_operands, gather_rows, load_slots


@triton.jit
def seen_scores(qk, row_scale, ok, ORDER: tl.constexpr, INTERPRET: tl.constexpr):
    """Raw products -> scores in log2 units, -inf where the slot names no row."""
    t = scaled_scores(qk, row_scale, "pow2", INTERPRET)
    return tl.where(ok[:, None] if ORDER == "tokens" else ok[None, :], t, -float("inf"))


@triton.jit
def tile_weights(
    q,
    q_rope,
    latent,
    rope,
    q_ptr,
    row_scale,
    k,
    l,
    ok,
    new_reference,
    num_heads,
    BM: tl.constexpr,
    BN: tl.constexpr,
    ORDER: tl.constexpr,
    REFERENCE: tl.constexpr,
    DTYPE: tl.constexpr,
    WGMMA: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """(P, k', l') of one tile."""
    T0: tl.constexpr = BN if ORDER == "tokens" else BM
    T1: tl.constexpr = BM if ORDER == "tokens" else BN
    qk = scores(q, latent, tl.zeros([T0, T1], tl.float32), ORDER, INTERPRET)
    if WGMMA and ORDER == "rows":
        # Keeps Triton from computing the scores in both warpgroups, and P in the layouts of both
        # dots: decode/triton/tile_step.py.
        rope_qk = scores(q_rope, rope, tl.zeros([T0, T1], tl.float32), ORDER, INTERPRET)
        qk = tl.fma(rope_qk, 1.0, qk)
        if num_heads > 0:
            t = seen_scores(qk, row_scale, ok, ORDER, INTERPRET)
            p, k, l = weights_of_scores(
                t, k, l, new_reference, ORDER, "pow2", REFERENCE, DTYPE, WGMMA, INTERPRET
            )
        else:
            p = tl.load(q_ptr + tl.arange(0, T0)[:, None] * T1 + tl.arange(0, T1)[None, :])
    else:
        qk = scores(q_rope, rope, qk, ORDER, INTERPRET)
        t = seen_scores(qk, row_scale, ok, ORDER, INTERPRET)
        p, k, l = weights_of_scores(
            t, k, l, new_reference, ORDER, "pow2", REFERENCE, DTYPE, WGMMA, INTERPRET
        )
    return p, k, l


@triton.jit
def attend_slots(
    q,
    q_rope,
    q_ptr,
    row_scale,
    kv_ptr,
    kv_scale_view_ptr,
    kv_rope_view_ptr,
    slots_ptr,
    page_stride,
    num_slots,
    kv_scale,
    start,
    stop,
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
    REFERENCE: tl.constexpr,
    ORDER: tl.constexpr,
    DTYPE: tl.constexpr,
    FP16_DOTS: tl.constexpr,
    HW_FP8: tl.constexpr,
    WGMMA: tl.constexpr,
    STAGES: tl.constexpr,
    CARRY: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """(O, k, l) over the slots [start, stop) of one token.

    k is the reference to start from; with REFERENCE "first" only tiles before `refresh` raise it.
    CARRY: the bytes of the next tile wait in registers, not in shared memory.
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
    # Slots are read a tile (with CARRY two) before the rows that they name.
    slot = load_slots(slots_ptr, start, stop, BN)
    if CARRY:
        latent_c, rope_c, scale_c, ok_c = gather_rows(
            kv_ptr, kv_scale_view_ptr, kv_rope_view_ptr, slot, page_stride, num_slots,
            FORMAT, BN, DV, DR, PAGE, ROW, GROUP, SCALE_OFFSET, ROPE_OFFSET,
        )  # fmt: skip
        slot = load_slots(slots_ptr, start + BN, stop, BN)
    for i in tl.range(start, stop, BN, num_stages=STAGES):
        if CARRY:
            latent, rope, ok = latent_c, rope_c, ok_c
            latent, rope = dot_operands(
                latent, rope, scale_c, kv_scale,
                FORMAT, DTYPE, FP16_DOTS, BN, DV, GROUP, HW_FP8,
            )  # fmt: skip
            latent_c, rope_c, scale_c, ok_c = gather_rows(
                kv_ptr, kv_scale_view_ptr, kv_rope_view_ptr, slot, page_stride, num_slots,
                FORMAT, BN, DV, DR, PAGE, ROW, GROUP, SCALE_OFFSET, ROPE_OFFSET,
            )  # fmt: skip
            slot = load_slots(slots_ptr, i + 2 * BN, stop, BN)
        else:
            latent, rope, scale, ok = gather_rows(
                kv_ptr, kv_scale_view_ptr, kv_rope_view_ptr, slot, page_stride, num_slots,
                FORMAT, BN, DV, DR, PAGE, ROW, GROUP, SCALE_OFFSET, ROPE_OFFSET,
            )  # fmt: skip
            slot = load_slots(slots_ptr, i + BN, stop, BN)
            latent, rope = dot_operands(
                latent, rope, scale, kv_scale,
                FORMAT, DTYPE, FP16_DOTS, BN, DV, GROUP, HW_FP8,
            )  # fmt: skip
        k_old = k
        p, k, l = tile_weights(
            q, q_rope, latent, rope, q_ptr, row_scale, k, l, ok, i < refresh, num_heads,
            BM, BN, ORDER, REFERENCE, DTYPE, WGMMA, INTERPRET,
        )  # fmt: skip
        if REFERENCE == "lazy":
            acc = rescale(acc, k_old, k, DTYPE, "pow2", ORDER)
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
