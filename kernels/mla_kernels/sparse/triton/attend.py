# SPDX-License-Identifier: Apache-2.0
"""One range of a token's slots against one tile of its heads, as a Triton device function.

Weights and values of a tile are the dense kernel's (decode/triton). A row is cut into PARTS: with
few heads what takes time is waiting, and four short chains of products wait less than one long one,
and one part is converted while another is multiplied. With wgmma there are fewer (tiles.py).
"""

import triton
import triton.language as tl

from mla_kernels.decode.triton.softmax import rescale, scaled_scores, token_sum
from mla_kernels.decode.triton.tile_step import add_values, dot, scores, weights_of_scores
from mla_kernels.sparse.triton.gather import (
    appended,
    as_operand,
    load_part,
    load_rope,
    load_slots,
    scaled_groups,
    slot_rows,
)


@triton.jit
def attend_slots(
    q,  # PARTS times [BM, DV // PARTS]
    q_rope,  # [BM, DR]
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
    ALIGN: tl.constexpr,
    PARTS: tl.constexpr,
    REFERENCE: tl.constexpr,
    DTYPE: tl.constexpr,
    FP16_DOTS: tl.constexpr,
    HW_FP8: tl.constexpr,
    WGMMA: tl.constexpr,
    STAGES: tl.constexpr,
    MAX_LOGITS: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """(O, k, l, top) over the slots [start, stop) of one token; O is PARTS times [BM, DV // PARTS].
    With MAX_LOGITS top is the largest q . k of each row.

    k is the reference to start from; with REFERENCE "first" only tiles before `refresh` raise it.
    """
    WIDTH: tl.constexpr = DV // PARTS
    # Row sums by a dot with ones, where they would take registers from O.
    SUM_BY_DOT: tl.constexpr = WGMMA and REFERENCE == "first"
    l = tl.zeros([BM], tl.float32)
    top = tl.full([BM], -float("inf"), tl.float32)
    weight = tl.zeros([BM, 16 if SUM_BY_DOT else BN], tl.float32)
    acc = ()
    for _ in tl.static_range(PARTS):
        acc = appended(acc, tl.zeros([BM, WIDTH], tl.float32))
    # Slots are read a tile before the rows that they name.
    slot = load_slots(slots_ptr, start, stop, BN)
    for i in tl.range(start, stop, BN, num_stages=STAGES):
        row, ok = slot_rows(slot, page_stride, num_slots, PAGE, ROW)
        slot = load_slots(slots_ptr, i + BN, stop, BN)
        latent = ()
        for j in tl.static_range(PARTS):
            code, scale = load_part(
                kv_ptr, kv_scale_view_ptr, row, ok, j, FORMAT, WIDTH, GROUP, SCALE_OFFSET, ALIGN
            )
            if FORMAT == "fp8_ds_mla":
                code = scaled_groups(code, scale, DTYPE, BN, WIDTH, HW_FP8)
            else:
                code = as_operand(code, kv_scale, FORMAT, DTYPE, FP16_DOTS, HW_FP8)
            latent = appended(latent, code)
        rope = load_rope(kv_ptr, kv_rope_view_ptr, row, ok, FORMAT, DV, DR, ROPE_OFFSET, ALIGN)
        rope = as_operand(rope, kv_scale, FORMAT, DTYPE, FP16_DOTS, HW_FP8)
        # Sums that are no dot(acc=), and for wgmma a branch that is always taken, keep Triton from
        # computing the scores in both warpgroups, and P twice: decode/triton/tile_step.py.
        zero = tl.zeros([BM, BN], tl.float32)
        sums = ()
        for j in tl.static_range(PARTS):
            sums = appended(sums, scores(q[j], latent[j], zero, "rows", INTERPRET))
        qk = scores(q_rope, rope, zero, "rows", INTERPRET)
        for j in tl.static_range(PARTS):
            qk = tl.fma(sums[j], 1.0, qk)
        k_old = k
        if WGMMA:
            if num_heads > 0:
                if MAX_LOGITS:
                    top = tl.maximum(top, tl.max(tl.where(ok[None, :], qk, -float("inf")), 1))
                t = scaled_scores(qk, row_scale, "pow2", INTERPRET)
                t = tl.where(ok[None, :], t, -float("inf"))
                p, k, l = weights_of_scores(
                    t, k, l, i < refresh, "rows", "pow2", REFERENCE, DTYPE, True, INTERPRET
                )
            else:
                p = tl.load(q_ptr + tl.arange(0, BM)[:, None] * BN + tl.arange(0, BN)[None, :])
        else:
            if MAX_LOGITS:
                top = tl.maximum(top, tl.max(tl.where(ok[None, :], qk, -float("inf")), 1))
            t = scaled_scores(qk, row_scale, "pow2", INTERPRET)
            t = tl.where(ok[None, :], t, -float("inf"))
            p, k, l = weights_of_scores(
                t, k, l, i < refresh, "rows", "pow2", REFERENCE, DTYPE, False, INTERPRET
            )
        if SUM_BY_DOT:
            ones = tl.full([BN, 16], 1.0, tl.float32).to(DTYPE)
            weight = dot(p, ones, weight, INTERPRET)
        elif REFERENCE == "first":
            weight += p.to(tl.float32)
        moved = ()
        for j in tl.static_range(PARTS):
            if REFERENCE == "lazy":
                o = rescale(acc[j], k_old, k, DTYPE, "pow2", "rows")
            else:
                o = acc[j]
            moved = appended(moved, add_values(p, latent[j], o, "rows", INTERPRET))
        acc = moved
    if REFERENCE == "first":
        if SUM_BY_DOT:
            l = tl.max(weight, 1)
        else:
            l = token_sum(weight, "rows")
    return acc, k, l, top
