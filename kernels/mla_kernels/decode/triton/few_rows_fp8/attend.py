# SPDX-License-Identifier: Apache-2.0
"""What a team of eight warps does with its tiles (kernel.py)."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.extra.cuda import gdc_launch_dependents

from mla_kernels import numerics
from mla_kernels.decode.hopper.layouts import BLOCK
from mla_kernels.decode.hopper.rings import ring_next, ring_previous
from mla_kernels.decode.hopper.segments import next_segment, start_segment, step_on
from mla_kernels.decode.triton.few_rows.operands import (
    KEYS_TO_F16,
    VALUES_TO_F16,
    codes_to_f16,
)
from mla_kernels.decode.triton.few_rows.results import per_row, write_out
from mla_kernels.decode.triton.few_rows_fp8.query import STEP, load_query, units_of
from mla_kernels.decode.triton.few_rows_fp8.teams import add_results, hand_over
from mla_kernels.decode.triton.softmax import integer_reference, pow2_int
from mla_kernels.triton_common.gluon_compat import cta_barrier, reinterpret

GRID_OFFSET = gl.constexpr(numerics.GRID_OFFSET)
EXPONENT_FLOOR = gl.constexpr(numerics.EXPONENT_FLOOR)
TAU = gl.constexpr(numerics.TAU)


@gluon.jit
def attend(
    start, seq_lens, requests, table, table_stride, q_ptr, q_stride_b, q_stride_s, q_stride_h,
    out, lse, part_acc, part_sums, scale_log2, cache_scale, num_rows, num_heads, s_q,
    ring, rope_ring, memory, handed_sums, full, empty, handed,
    BM: gl.constexpr, SLOTS: gl.constexpr, TEAMS: gl.constexpr, TEAM: gl.constexpr,
    CAUSAL: gl.constexpr, CHUNKED: gl.constexpr,
):  # fmt: skip
    """Scores, softmax, values and results of a team's tiles, by eight warps in step. The places
    SLOTS * TEAM and up of both rings are this team's."""
    WARPS: gl.constexpr = 8
    BN: gl.constexpr = BLOCK
    GROUPS: gl.constexpr = 4
    UNITS: gl.constexpr = 64
    ROPE_UNITS: gl.constexpr = 32
    DR: gl.constexpr = 2 * ROPE_UNITS
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [GROUPS, 1, WARPS // GROUPS], [1, 16, 8])
    ROPE_MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, WARPS], [16, 8])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    ROPE_LEFT: gl.constexpr = gl.DotOperandLayout(0, ROPE_MMA, 2)
    ROPE_RIGHT: gl.constexpr = gl.DotOperandLayout(1, ROPE_MMA, 2)
    PARTIAL: gl.constexpr = gl.BlockedLayout(
        [GROUPS, 1, 4], [1, 128 // BN, BN // 4], [1, WARPS, 1], [2, 1, 0]
    )
    SCORES: gl.constexpr = gl.SliceLayout(0, PARTIAL)
    SCORE_ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    SCORE_TOKEN: gl.constexpr = gl.SliceLayout(0, SCORES)
    LANES: gl.constexpr = gl.BlockedLayout([1, 1], [128 // BN, BN // 4], [WARPS, 1], [1, 0])
    O_ROW: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, MMA))
    LATENT: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [2, 1, 0])
    ROPE: gl.constexpr = gl.SwizzledSharedLayout(8, 2, 4, [1, 0])
    FIRST: gl.constexpr = TEAM * SLOTS
    latent_ring = reinterpret(ring, ring.dtype, [TEAMS * SLOTS, GROUPS, BN, UNITS], LATENT)
    keys_ring = reinterpret(rope_ring, ring.dtype, [TEAMS * SLOTS, BN, ROPE_UNITS], ROPE)
    given = gl.to_tensor(0)  # tiles that the other team had so far
    phases = gl.to_tensor(0)  # of `handed`, a bit each
    a_shared = reinterpret(memory.partial, ring.dtype, [2, GROUPS, BM, UNITS], LATENT).index(0)
    token = gl.arange(0, BN, SCORE_TOKEN)
    row = gl.program_id(0) * BM + gl.arange(0, BM, SCORE_ROW)
    ones = gl.full([BM, BN], 1.0, gl.float32, SCORES)
    plan, request, lo, hi, end, split = start_segment(
        start, seq_lens, requests, table, table_stride, CHUNKED
    )
    i = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    while request <= plan.last:
        length = gl.load(seq_lens + request)
        limit = length
        if CAUSAL:
            limit = length - s_q + 1 + row // num_heads
        q_a, q_b, up = load_query(
            q_ptr + request.to(gl.int64) * q_stride_b, q_stride_s, q_stride_h, num_rows, num_heads,
            a_shared, memory.b, memory.q_rope, DR, LEFT, WARPS,
        )  # fmt: skip
        row_scale = scale_log2 * cache_scale * up

        k = gl.full([BM], EXPONENT_FLOOR, gl.float32, SCORE_ROW)
        weight = gl.full([BM, BN // 4], 0.0, gl.float32, LANES)  # row sums, one a thread
        o_a = gl.full([GROUPS, BM, UNITS], 0.0, gl.float32, MMA)
        o_b = o_a
        cta_barrier()
        for n in range(lo + TEAM, hi, TEAMS):
            mbarrier.wait(full.index(FIRST + i), phase)
            latent = latent_ring.index(FIRST + i)
            qk = gl.full([GROUPS, BM, BN], 0.0, gl.float32, MMA)
            for c in gl.static_range(UNITS // STEP):
                units = latent.slice(c * STEP, STEP, dim=2).permute((0, 2, 1)).load(RIGHT)
                keys_a, keys_b = codes_to_f16(units, KEYS_TO_F16)
                qk = mma_v2(q_a[c], keys_a, qk)
                if c == 0:
                    qk = mma_v2(q_b, keys_b, qk)
                else:
                    qk = mma_v2(units_of(memory.b, c, LEFT), keys_b, qk)
            memory.partial.store(qk)
            units = keys_ring.index(FIRST + i).permute((1, 0)).load(ROPE_RIGHT)
            keys_a, keys_b = codes_to_f16(units, KEYS_TO_F16)
            qk = gl.full([BM, BN], 0.0, gl.float32, ROPE_MMA)
            qk_b = mma_v2(memory.q_rope.index(1).load(ROPE_LEFT), keys_b, qk)
            qk = mma_v2(memory.q_rope.index(0).load(ROPE_LEFT), keys_a, qk) + qk_b
            memory.rope.store(qk)

            cta_barrier()
            # All are past P V of the tile before. An arrival: `arrive` would bring two barriers.
            mbarrier.expect(empty.index(FIRST + ring_previous(i, SLOTS)), 0, pred=n > lo + TEAM)
            qk = gl.sum(memory.partial.load(PARTIAL), 0) + memory.rope.load(SCORES)
            t = gl.fma(qk, ones * row_scale, ones * GRID_OFFSET)
            left = limit - n * BN
            if CAUSAL:
                seen = token[None, :] < left[:, None]
            else:
                seen = (token < left)[None, :]
            t = gl.where(seen, t, float("-inf"))
            t_max = integer_reference(gl.max(t, 1))
            k_new = gl.where(t_max > k + TAU, t_max, k)
            factor = pow2_int(k - k_new)
            k = k_new
            p = gl.exp2(t - (k + GRID_OFFSET)[:, None]).to(gl.float16)
            sums = gl.sum(gl.reshape(p.to(gl.float32), [BM, BN // 4, 4]), 2)
            by = gl.convert_layout(factor, gl.SliceLayout(1, LANES), assert_trivial=True)[:, None]
            weight = weight * by + gl.convert_layout(sums, LANES, assert_trivial=True)
            memory.factor.store(factor)
            memory.p.store(gl.permute(gl.reshape(p, [BM, BN // STEP, STEP]), (1, 0, 2)))

            factor = per_row(memory.factor.load(O_ROW))
            o_a = o_a * factor
            o_b = o_b * factor
            for c in gl.static_range(BN // STEP):
                p = memory.p.slice(c, 1, dim=0).load(LEFT)
                p, _ = gl.broadcast(p, gl.full([GROUPS, 1, 1], 0.0, gl.float16, LEFT))
                units = latent.slice(c * STEP, STEP, dim=1).load(RIGHT)
                values_a, values_b = codes_to_f16(units, VALUES_TO_F16)
                o_a = mma_v2(p, values_a, o_a)
                o_b = mma_v2(p, values_b, o_b)
            i, phase = ring_next(i, phase, SLOTS)
        last = FIRST + ring_previous(i, SLOTS)
        o = gl.reshape(gl.join(o_a, o_b), [GROUPS, BM, 2 * UNITS])
        l = gl.convert_layout(gl.sum(weight, 1), SCORE_ROW)
        # What is next is read behind the results, which need not wait for it. With causal limits
        # there is no register left for that.
        if CAUSAL:
            after, after_lo, after_hi, after_end = next_segment(plan, request, hi, end)
            is_last = after > plan.last
        else:
            is_last = (request >= plan.last) & (hi >= end)
        if TEAM == 0:
            slot = gl.load(requests + request * 4 + 0)
            splits = gl.load(requests + request * 4 + 1)
            mbarrier.arrive(empty.index(last), count=1)
            if TEAMS == 2:
                theirs = (hi - lo) // 2
                given = given + theirs
                if theirs > 0:
                    at = (given + SLOTS - 1) % SLOTS
                    mbarrier.wait(handed.index(at), (phases >> at) & 1)
                    phases = phases ^ (1 << at)
                    o, l, k = add_results(o, l, k, ring, SLOTS + at, handed_sums, at)
                    mbarrier.arrive(empty.index(SLOTS + at), count=1)
            if is_last:  # the merge (decode/merge/kernel.py)
                gdc_launch_dependents()
            write_out(
                o, l, k, cache_scale, out, lse, part_acc, part_sums, request, splits, slot + split,
                num_rows,
            )  # fmt: skip
        else:
            if hi - lo > 1:
                cta_barrier()  # all are past P V: its tile makes room
                hand_over(o, l, k, ring, last, handed_sums, last - FIRST)
                mbarrier.arrive(handed.index(last - FIRST), count=1)
        if not CAUSAL:
            after, after_lo, after_hi, after_end = next_segment(plan, request, hi, end)
        request, lo, hi, end, split = step_on(request, split, after, after_lo, after_hi, after_end)
