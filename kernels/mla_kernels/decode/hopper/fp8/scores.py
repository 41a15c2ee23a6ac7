# SPDX-License-Identifier: Apache-2.0
"""Warpgroup 0: S^T = K Q^T, the softmax over tokens, P^T for the value warpgroups."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
)

from mla_kernels import numerics
from mla_kernels.decode.hopper.fp8.operands import accumulator
from mla_kernels.decode.hopper.fp8.products import grouped_tile_scores, step_scores
from mla_kernels.decode.hopper.fp8.query import convert_query, load_query
from mla_kernels.decode.hopper.fp8.softmax import (
    along_pairs,
    load_scale,
    log2,
    pair_max,
    pair_sums,
    round_f16,
    store_ratios,
)
from mla_kernels.decode.hopper.layouts import BLOCK
from mla_kernels.decode.hopper.stream import (
    next_segment,
    ring_next,
    start_segment,
)
from mla_kernels.decode.triton.few_rows.operands import LEAST_SCALE
from mla_kernels.decode.triton.softmax import integer_reference, pow2_int

LN2 = gl.constexpr(numerics.LN2)
GRID_OFFSET = gl.constexpr(numerics.GRID_OFFSET)
EXPONENT_FLOOR = gl.constexpr(numerics.EXPONENT_FLOOR)
TAU = gl.constexpr(numerics.TAU)


@gluon.jit
def scores_warpgroup(
    q_desc, q_rope_desc, kv_scale,
    start, requests, seq_lens, table, table_stride, lse, part_sums, scale_log2,
    query, rope_q, rope_a, rope_b, full_q, ring_a, ring_b, rope_ring, scale_ring, ratios,
    full_a, full_b, p_ring, factors, moved, highest, full_p, empty_p,
    inverse, full_out, empty_out, num_rows, num_heads, s_q,
    N: gl.constexpr, STEP: gl.constexpr, SLOTS: gl.constexpr, SLOTS_P: gl.constexpr,
    ADDENDS: gl.constexpr, AHEAD: gl.constexpr, GROUPED: gl.constexpr,
    LOAD_SCALE: gl.constexpr, CAUSAL: gl.constexpr, CHUNKED: gl.constexpr,
):  # fmt: skip
    SCORES: gl.constexpr = accumulator(N)
    HEAD: gl.constexpr = gl.SliceLayout(0, SCORES)
    EACH: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])  # all of [4] in every thread
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    cache_scale = gl.to_tensor(1.0)
    if LOAD_SCALE:
        cache_scale = gl.load(kv_scale)
    else:
        cache_scale = kv_scale
    i = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    ip = gl.to_tensor(0)
    pp = gl.to_tensor(1)
    po = gl.to_tensor(1)
    pq = gl.to_tensor(0)
    first_row = gl.program_id(0) * N
    token = gl.arange(0, BLOCK, gl.SliceLayout(1, SCORES))
    row = first_row + gl.arange(0, N, HEAD)
    row_ok = row < num_rows
    plan, request, lo, hi, end, split = start_segment(
        start, seq_lens, requests, table, table_stride, CHUNKED
    )
    while request <= plan.last:
        length = gl.load(seq_lens + request)
        slot = gl.load(requests + request * 4 + 0)
        splits = gl.load(requests + request * 4 + 1)
        after, after_lo, after_hi, after_end = next_segment(plan, request, hi, end)
        load_query(q_desc, q_rope_desc, request, query, rope_q, full_q)
        mbarrier.wait(full_q, pq)
        pq = pq ^ 1
        up = convert_query(query, rope_q, rope_a, rope_b, GROUPED)
        row_scale = scale_log2 * cache_scale
        if not GROUPED:
            row_scale = row_scale * up
        fence_async_shared()
        base = gl.full([N], EXPONENT_FLOOR + GRID_OFFSET, gl.float32, HEAD)  # k + GRID_OFFSET
        weight = pair_sums(gl.zeros([BLOCK, N], gl.float32, SCORES))  # row sums, one a thread
        WEIGHT: gl.constexpr = weight.type.layout
        # Row r may see keys below `limit`; tiles below `unmasked` need no mask at all.
        limit = gl.full([N], 0, gl.int32, HEAD) + length
        unmasked = length // BLOCK
        if CAUSAL:
            limit = length - (s_q - 1) + row // num_heads
            unmasked = (length - (s_q - 1)) // BLOCK
        limit = gl.minimum(limit, hi * BLOCK)
        unmasked = gl.minimum(unmasked, hi)
        for n in range(lo, hi, STEP):
            scores = ()
            inverses = ()
            if GROUPED:
                for t in gl.static_range(STEP):
                    mbarrier.wait(full_a.index(i), phase)
                    mbarrier.wait(full_b.index(i), phase)
                    scales = ()
                    for g in gl.static_range(4):
                        scale = load_scale(scale_ring.index(i), g, gl.SliceLayout(1, SCORES))
                        if n + t >= unmasked:
                            left = gl.minimum(length, hi * BLOCK) - (n + t) * BLOCK
                            scale = gl.where(token < left, scale, 0.0)
                        scales = scales + (scale,)  # type: ignore  # noqa: RUF005
                    largest = gl.maximum(
                        gl.maximum(gl.abs(scales[0]), gl.abs(scales[1])),  # type: ignore
                        gl.maximum(gl.abs(scales[2]), gl.abs(scales[3])),  # type: ignore
                    )
                    largest = gl.maximum(largest, LEAST_SCALE)
                    inverse_scale = 1.0 / largest
                    ups = ()
                    for g in gl.static_range(4):
                        ups = ups + (scales[g] * up,)  # type: ignore  # noqa: RUF005
                    if t == 0:
                        mbarrier.wait(empty_p.index(ip), pp)
                    store_ratios(scales, inverse_scale, ratios.index(ip * STEP + t))
                    x = grouped_tile_scores(ring_a, ring_b, rope_ring, i, query, rope_q, ups, N)
                    offset = (log2(largest) + GRID_OFFSET)[:, None] + gl.zeros_like(x)
                    x = gl.fma(x, gl.zeros_like(x) + row_scale, offset)
                    if n + t >= unmasked:
                        seen = ((n + t) * BLOCK + token)[:, None] < limit[None, :]
                        x = gl.where(seen, x, float("-inf"))
                    scores = scores + (x,)  # type: ignore  # noqa: RUF005
                    inverses = inverses + (inverse_scale,)  # type: ignore  # noqa: RUF005
                    i, phase = ring_next(i, phase, SLOTS)
            else:
                slots = ()
                for _t in gl.static_range(STEP):
                    mbarrier.wait(full_a.index(i), phase)
                    mbarrier.wait(full_b.index(i), phase)
                    slots = slots + (i,)  # type: ignore  # noqa: RUF005
                    i, phase = ring_next(i, phase, SLOTS)
                parts = step_scores(
                    ring_a, ring_b, rope_ring, slots, query, rope_a, rope_b,
                    N, STEP, ADDENDS, AHEAD,
                )  # fmt: skip
                for t in gl.static_range(STEP):
                    x = parts[t] if ADDENDS == 1 else parts[2 * t] + parts[2 * t + 1]
                    if n + t >= unmasked:
                        seen = ((n + t) * BLOCK + token)[:, None] < limit[None, :]
                        x = gl.where(seen, x, float("-inf"))
                    scores = scores + (gl.fma(x, row_scale, GRID_OFFSET),)  # type: ignore  # noqa: RUF005
            most = scores[0]  # type: ignore
            if STEP == 2:
                most = gl.maximum(most, scores[1])  # type: ignore
            if not GROUPED:
                mbarrier.wait(empty_p.index(ip), pp)
            # Whether any reference moves, before who moves where: few steps move one.
            above = pair_max(most) - along_pairs(base, WEIGHT)
            highest.store(gl.max(gl.reshape(above, [4, 8 * N]), 1))
            moves = (gl.max(highest.load(EACH), 0) > TAU).to(gl.int32)
            moved.index(ip).store(gl.full([1], 0, gl.int32, ONE) + moves)
            if moves != 0:
                top = integer_reference(gl.max(most, 0)) + GRID_OFFSET
                top = gl.where(top > base + TAU, top, base)
                factor = pow2_int(base - top)
                factors.index(ip).store(factor)
                weight = weight * along_pairs(factor, WEIGHT)
                base = top
            for t in gl.static_range(STEP):
                p = gl.exp2(scores[t] - base[None, :])
                rounded = round_f16(p)
                if GROUPED:
                    weight += pair_sums(p * inverses[t][:, None])
                else:
                    weight += pair_sums(rounded.to(gl.float32))
                p_ring.index(ip * STEP + t).store(rounded)
            fence_async_shared()
            mbarrier.arrive(full_p.index(ip), count=1)
            ip, pp = ring_next(ip, pp, SLOTS_P)

        total = gl.convert_layout(gl.sum(gl.sum(weight, 0), 0), HEAD)
        k = base - GRID_OFFSET
        seen = total > 0.0
        mbarrier.wait(empty_out, po)
        if splits == 1:
            inverse.store(gl.where(seen, 1.0 / total, 0.0) * cache_scale)
            value = gl.where(seen, (k + gl.log2(total)) * LN2, -float("inf"))
            gl.store(lse + request * num_rows + row, value, mask=row_ok)
        else:
            inverse.store(gl.full([N], 1.0, gl.float32, HEAD) * cache_scale)
            at = ((slot + split) * num_rows + row) * 2
            gl.store(part_sums + at, total, mask=row_ok)
            gl.store(part_sums + at + 1, k, mask=row_ok)
        mbarrier.arrive(full_out, count=1)
        po = po ^ 1
        split = gl.where(after == request, split + 1, 0)
        request = after + 0
        lo = after_lo + 0
        hi = after_hi + 0
        end = after_end + 0
