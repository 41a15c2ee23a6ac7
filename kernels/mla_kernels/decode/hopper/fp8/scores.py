# SPDX-License-Identifier: Apache-2.0
"""Warpgroups 0 and 3: S^T = K Q^T, the softmax over tokens, P^T for the value warpgroups.

They take the program's tiles in turn, so that one multiplies while the other is busy with its
softmax. Row references are in shared memory: a tile's are final (`decided`) before its exp2, and
that is all that the next tile waits for. Each keeps row sums of its own tiles, at the common
references; warpgroup 0 adds both at the end of a segment.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
)
from triton.language.extra.cuda import gdc_launch_dependents

from mla_kernels import numerics
from mla_kernels.decode.hopper.fp8.operands import accumulator
from mla_kernels.decode.hopper.fp8.products import group_scores, tile_scores
from mla_kernels.decode.hopper.fp8.query import convert_query, load_query
from mla_kernels.decode.hopper.fp8.softmax import any_moves, pair_max, round_f16
from mla_kernels.decode.hopper.fp8.sums import (
    IN_REGISTERS,
    along_pairs,
    at_factors,
    by_products,
    most_of_warps,
    no_sums,
    not_hoisted,
    of_pairs,
    of_rows,
)
from mla_kernels.decode.hopper.fp8.tile_scales import clear_scales_past, scale_rope, store_ratios
from mla_kernels.decode.hopper.fp8.token_scales import (
    load_scales,
    log2,
    store_planes,
    sum_of_groups,
)
from mla_kernels.decode.hopper.layouts import BLOCK, SCALES_READ
from mla_kernels.decode.hopper.scales import FIRST, TILE_HEADROOM, next_exponent, power_of_two
from mla_kernels.decode.hopper.segments import next_segment, start_segment, step_on
from mla_kernels.decode.triton.softmax import integer_reference, pow2_int
from mla_kernels.triton_common.gluon_compat import reinterpret

LN2 = gl.constexpr(numerics.LN2)
GRID_OFFSET = gl.constexpr(numerics.GRID_OFFSET)
EXPONENT_FLOOR = gl.constexpr(numerics.EXPONENT_FLOOR)
TAU = gl.constexpr(numerics.TAU)
COLUMNS = gl.constexpr(gl.BlockedLayout([4, 1], [1, 32], [1, 4], [0, 1]))  # [4, N]: a row's
ONE = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))  # an element a thread


@gluon.jit
def follow(sums, factors, moved):
    """The row sums at the references that the other warpgroup's tile has moved."""
    if gl.max(moved.load(ONE), 0) != 0:
        sums = at_factors(sums, factors)
    return sums


@gluon.jit
def scores_warpgroup(
    q_desc, q_rope_desc, kv_scale,
    start, requests, seq_lens, table, table_stride, lse, part_sums, scale_log2,
    query, query_rope, full_q, tops, full_tops, ready_q, row_scales, ring_a, ring_b, rope_ring,
    scale_ring, ratios, full_a, full_b, p_ring, bases, factors, moved, decided, full_p, empty_p,
    sums, limits, zeros, full_sums, inverse, full_out, empty_out, num_rows, num_heads, s_q,
    ME: gl.constexpr, N: gl.constexpr, SLOTS: gl.constexpr,
    ADDENDS: gl.constexpr, AHEAD: gl.constexpr, SCALE_OF: gl.constexpr,
    LOAD_SCALE: gl.constexpr, CAUSAL: gl.constexpr, CHUNKED: gl.constexpr,
):  # fmt: skip
    SCORES: gl.constexpr = accumulator(N)
    HEAD: gl.constexpr = gl.SliceLayout(0, SCORES)
    OTHER: gl.constexpr = 1 - ME
    PLANES: gl.constexpr = 4 if SCALE_OF == "token" else 1
    HEADROOM: gl.constexpr = TILE_HEADROOM if SCALE_OF == "tile" else 0.0
    cache_scale = gl.to_tensor(1.0)
    if LOAD_SCALE:
        cache_scale = gl.load(kv_scale)
    else:
        cache_scale = kv_scale
    before = gl.to_tensor(0)  # tiles of this program in earlier segments
    segment = gl.to_tensor(0)
    first_row = gl.program_id(0) * N
    token = gl.arange(0, BLOCK, gl.SliceLayout(1, SCORES))
    row = first_row + gl.arange(0, N, ONE)
    plan, request, lo, hi, end, split = start_segment(
        start, seq_lens, requests, table, table_stride, CHUNKED
    )
    if ME == 0 and request <= plan.last:
        load_query(q_desc, q_rope_desc, request, query, query_rope, full_q)
    while request <= plan.last:
        length = gl.load(seq_lens + request)
        mbarrier.wait(full_q, segment & 1)
        if ME == 0:
            bases.store(gl.full([N], EXPONENT_FLOOR + GRID_OFFSET, gl.float32, ONE))
            if CAUSAL:
                behind = length - (s_q - 1) + row // num_heads
                limits.store(gl.minimum(behind, hi * BLOCK))
        zero = gl.max(zeros.load(ONE), 0)
        up = convert_query(query, query_rope, tops, full_tops, segment & 1, zero, ME, SCALE_OF)
        if ME == 0:
            row_scales.store(gl.full([1], 0.0, gl.float32, ONE) + scale_log2 * cache_scale * up)
        fence_async_shared()
        mbarrier.arrive(ready_q, count=1)
        mbarrier.wait(ready_q, segment & 1)
        weight = no_sums(N)  # row sums
        # SCALE_OF "tile": log2 M, anew for each segment, whose bits no other request may change.
        exponent = gl.to_tensor(FIRST)
        # Row r may see keys below `limit`; tiles below `unmasked` need no mask at all.
        unmasked = length // BLOCK
        if CAUSAL:
            unmasked = (length - (s_q - 1)) // BLOCK
        unmasked = gl.minimum(unmasked, hi)
        for n in range(lo + ((before + ME) & 1), hi, 2):
            number = before + (n - lo)
            i = number % SLOTS
            phase = (number // SLOTS) & 1
            mbarrier.wait(full_a.index(i), phase)
            mbarrier.wait(full_b.index(i), phase)
            scales = scale_ring.index(i)
            if SCALE_OF == "tile":
                if n >= unmasked:
                    clear_scales_past(scales, gl.minimum(length, hi * BLOCK) - n * BLOCK)
                exponent = next_exponent(scales, exponent)
                store_ratios(scales, exponent, ratios.index(i))
                if exponent != FIRST:
                    scale_rope(rope_ring.index(i), power_of_two(FIRST - exponent))
            zero = gl.max(zeros.load(ONE), 0)
            if SCALE_OF == "token":
                of_groups, largest = load_scales(
                    scales, n, unmasked, length, hi, gl.SliceLayout(1, SCORES)
                )
                inverse_scale = 1.0 / largest
                groups = group_scores(
                    ring_a, ring_b, rope_ring, i, query, query_rope, zero, N, AHEAD
                )
                x = sum_of_groups(groups, of_groups)
            else:
                x = tile_scores(
                    ring_a, ring_b, rope_ring, i, query, query_rope, zero, ratios.index(i),
                    N, ADDENDS, AHEAD, SCALE_OF == "tile",
                )  # fmt: skip
            row_scale = gl.max(row_scales.load(ONE), 0)
            if SCALE_OF == "token":
                x = gl.fma(x, row_scale, (log2(largest) + GRID_OFFSET)[:, None] + gl.zeros_like(x))
            elif SCALE_OF == "tile":
                x = gl.fma(x, row_scale * power_of_two(exponent), GRID_OFFSET + exponent)
            else:
                x = gl.fma(x, row_scale, GRID_OFFSET)
            if n >= unmasked:
                if CAUSAL:
                    limit = limits.load(HEAD)
                else:
                    limit = gl.full([N], 0, gl.int32, HEAD) + gl.minimum(length, hi * BLOCK)
                seen = (n * BLOCK + token)[:, None] < limit[None, :]
                x = gl.where(seen, x, float("-inf"))
            mbarrier.wait(empty_p.index(ME), ((number >> 1) & 1) ^ 1)
            mbarrier.wait(decided.index(OTHER), ((number - 1) >> 1) & 1)
            weight = follow(weight, factors.index(OTHER), moved.index(OTHER))
            base = bases.load(HEAD)
            # Whether any reference moves, before who moves where: few steps move one.
            highs = pair_max(x)
            WEIGHT: gl.constexpr = highs.type.layout
            above = highs - along_pairs(base, WEIGHT)
            rows = p_ring.index(PLANES * ME)  # nobody reads it now
            votes = reinterpret(rows, gl.int32, [N // 4, 32, 4], SCALES_READ).index(0)
            moves = any_moves(above, TAU + HEADROOM, votes)
            moved.index(ME).store(gl.full([1], 0, gl.int32, ONE) + moves)
            if moves != 0:
                most = gl.convert_layout(most_of_warps(x), COLUMNS)
                most = gl.convert_layout(gl.max(most, 0), ONE, assert_trivial=True)
                top = integer_reference(most) + (GRID_OFFSET - HEADROOM)
                now = bases.load(ONE)
                top = gl.where(top > now + TAU, top, now)
                factors.index(ME).store(pow2_int(now - top))
                bases.store(top)
                weight = at_factors(weight, factors.index(ME))
            base = bases.load(HEAD)  # again: registers are short
            mbarrier.arrive(decided.index(ME), count=1)
            p = gl.exp2(x - base[None, :])
            if SCALE_OF == "token":
                weight += of_pairs(p * inverse_scale[:, None])
                store_planes(p, of_groups, inverse_scale, p_ring, ME)
            else:
                rounded = round_f16(p)
                p_ring.index(ME).store(rounded)
            fence_async_shared()
            mbarrier.arrive(full_p.index(ME), count=1)
            # Behind the hand-over, which the value warpgroups wait for.
            if SCALE_OF != "token":
                if N > IN_REGISTERS:
                    summed = by_products(p_ring.index(ME))
                else:
                    summed = of_pairs(not_hoisted(rounded).to(gl.float32))
                if SCALE_OF == "tile":
                    summed = summed * power_of_two(-exponent)
                weight += summed

        after, after_lo, after_hi, after_end = next_segment(plan, request, hi, end)
        before = before + (hi - lo)
        last = before - 1
        if (last & 1) != ME:
            mbarrier.wait(decided.index(OTHER), (last >> 1) & 1)
            # The last scores are made: nobody reads this query any more.
            if after <= plan.last:
                load_query(q_desc, q_rope_desc, after, query, query_rope, full_q)
            weight = follow(weight, factors.index(OTHER), moved.index(OTHER))
        total = gl.convert_layout(of_rows(weight), ONE)
        if ME == 1:
            sums.store(total)
            mbarrier.arrive(full_sums, count=1)
        else:
            mbarrier.wait(full_sums, segment & 1)
            total = total + sums.load(ONE)
            k = bases.load(ONE) - GRID_OFFSET
            seen = total != 0.0  # NaN too
            slot = gl.load(requests + request * 4 + 0)
            splits = gl.load(requests + request * 4 + 1)
            row_ok = row < num_rows
            mbarrier.wait(empty_out, (segment & 1) ^ 1)
            if splits == 1:
                inverse.store(gl.where(seen, 1.0 / total, 0.0) * cache_scale)
                value = gl.where(seen, (k + gl.log2(total)) * LN2, -float("inf"))
                gl.store(lse + request * num_rows + row, value, mask=row_ok)
            else:
                inverse.store(gl.full([N], 1.0, gl.float32, ONE) * cache_scale)
                at = ((slot + split) * num_rows + row) * 2
                gl.store(part_sums + at, total, mask=row_ok)
                gl.store(part_sums + at + 1, k, mask=row_ok)
            mbarrier.arrive(full_out, count=1)
        segment = segment + 1
        request, lo, hi, end, split = step_on(request, split, after, after_lo, after_hi, after_end)
    gdc_launch_dependents()  # the merge (decode/merge/kernel.py)
