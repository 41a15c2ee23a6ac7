# SPDX-License-Identifier: Apache-2.0
"""Warpgroup 0: S = Q K^T, the softmax, and P handed to the two PV warpgroups."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents

from mla_kernels import numerics
from mla_kernels.decode.hopper.bf16.loads import take_query
from mla_kernels.decode.hopper.layouts import (
    BLOCK,
    QUADS,
    SCORES,
    SCORES_COL,
    SCORES_ROW,
)
from mla_kernels.decode.hopper.rings import ring_next, ring_previous
from mla_kernels.decode.hopper.segments import next_segment, start_segment, step_on
from mla_kernels.decode.hopper.softmax import (
    EXPONENT_FLOOR,
    o_factor,
    of_rows,
    publish_factors,
    softmax_step,
    sums_of_rows,
)

LN2 = gl.constexpr(numerics.LN2)


@gluon.jit
def issue_scores(
    q_a, q_b, q_rope, q_shared, ring_a, ring_b, ring_r, full_a, full_b, ia, pa, ib, pb
):  # fmt: skip
    """Q K^T of one tile, asynchronous. Three quarters of Q's k-steps come from registers."""
    s = gl.zeros([BLOCK, BLOCK], gl.float32, SCORES)
    mbarrier.wait(full_a.index(ia), pa)
    s = warpgroup_mma(q_a, ring_a.index(ia).permute((1, 0)), s, use_acc=False, is_async=True)
    mbarrier.wait(full_b.index(ib), pb)
    b = ring_b.index(ib)
    b_k = b.slice(0, 128, dim=1).permute((1, 0))
    s = warpgroup_mma(q_b, b_k, s, is_async=True)
    s = warpgroup_mma(q_shared, b.slice(128, 128, dim=1).permute((1, 0)), s, is_async=True)
    return warpgroup_mma(q_rope, ring_r.index(ib).permute((1, 0)), s, is_async=True)


@gluon.jit
def scores_warpgroup(
    start, requests, seq_lens, table, table_stride, lse, part_sums, scale_log2,
    q_shared, ring_a, ring_b, ring_r, full_a, full_b,
    p_ring, full_p_a, full_p_b, empty_p, full_q, factors, inverse, full_out, empty_out,
    num_rows, num_heads, s_q,
    SLOTS_A: gl.constexpr, SLOTS_B: gl.constexpr, SLOTS_P: gl.constexpr,
    RESCALE: gl.constexpr, CAUSAL: gl.constexpr, CHUNKED: gl.constexpr,
):  # fmt: skip
    first_row = gl.program_id(0) * BLOCK
    ia = gl.to_tensor(0)
    pa = gl.to_tensor(0)
    ib = gl.to_tensor(0)
    pb = gl.to_tensor(0)
    ip = gl.to_tensor(0)
    pp = gl.to_tensor(1)
    po = gl.to_tensor(1)
    col = gl.arange(0, BLOCK, SCORES_COL)
    row = gl.arange(0, BLOCK, SCORES_ROW)
    row_ok = first_row + row < num_rows
    plan, request, lo, hi, end, split = start_segment(
        start, seq_lens, requests, table, table_stride, CHUNKED
    )
    while request <= plan.last:
        length = gl.load(seq_lens + request)
        slot = gl.load(requests + request * 4 + 0)
        splits = gl.load(requests + request * 4 + 1)
        after, after_lo, after_hi, after_end = next_segment(plan, request, hi, end)
        # The query tile is the first of the segment's stream: registers, and 128 columns shared.
        mbarrier.wait(full_a.index(ia), pa)
        mbarrier.wait(full_b.index(ib), pb)
        q_a, q_b, q_rope = take_query(
            ring_a.index(ia), ring_b.index(ib), ring_r.index(ib), q_shared
        )
        mbarrier.arrive(full_q, count=1)
        ia, pa = ring_next(ia, pa, SLOTS_A)
        ib, pb = ring_next(ib, pb, SLOTS_B)

        k = gl.full([BLOCK, 4], EXPONENT_FLOOR, gl.float32, QUADS)
        l = gl.zeros([BLOCK, 4], gl.float32, QUADS)
        # Row r may see keys below `limit`; tiles below `unmasked` need no mask at all.
        limit = gl.full([BLOCK], 0, gl.int32, SCORES_ROW) + length
        unmasked = length // BLOCK
        if CAUSAL:
            limit = length - (s_q - 1) + (first_row + row) // num_heads
            unmasked = (length - (s_q - 1)) // BLOCK
        for n in range(lo, hi):
            token = issue_scores(
                q_a, q_b, q_rope, q_shared, ring_a, ring_b, ring_r, full_a, full_b, ia, pa, ib, pb
            )  # fmt: skip
            # Warpgroup 1 gets P(n-1) only now: its half of PV(n-1) fills the tensor cores while
            # this warpgroup is busy with softmax(n).
            mbarrier.arrive(full_p_a.index(ring_previous(ip, SLOTS_P)), count=1, pred=n > lo)
            if RESCALE == "pow2":  # while Q K^T runs; amla has no registers to spare
                mbarrier.wait(empty_p.index(ip), pp)
            s = warpgroup_mma_wait(0, deps=(token,))
            ia, pa = ring_next(ia, pa, SLOTS_A)
            ib, pb = ring_next(ib, pb, SLOTS_B)
            if n >= unmasked:
                s = gl.where((n * BLOCK + col)[None, :] < limit[:, None], s, -float("inf"))
            p, factor, k, l = softmax_step(s, k, l, scale_log2, RESCALE)
            if RESCALE != "pow2":
                mbarrier.wait(empty_p.index(ip), pp)
            p_ring.index(ip).store(p)
            publish_factors(factors.index(ip), factor)
            fence_async_shared()
            mbarrier.arrive(full_p_b.index(ip), count=1)  # warpgroup 2 starts PV(n)
            ip, pp = ring_next(ip, pp, SLOTS_P)
        mbarrier.arrive(full_p_a.index(ring_previous(ip, SLOTS_P)), count=1)

        total = sums_of_rows(l)
        reference = of_rows(k)
        seen = total != 0.0  # NaN too
        mbarrier.wait(empty_out, po)
        at = first_row + row
        if splits == 1:
            inverse.store(gl.where(seen, 1.0 / (total * o_factor(reference, RESCALE)), 0.0))
            value = gl.where(seen, (reference + gl.log2(total)) * LN2, -float("inf"))
            gl.store(lse + request * num_rows + at, value, mask=row_ok)
        else:
            inverse.store(1.0 / o_factor(reference, RESCALE))
            at = ((slot + split) * num_rows + at) * 2
            gl.store(part_sums + at, total, mask=row_ok)
            gl.store(part_sums + at + 1, reference, mask=row_ok)
        mbarrier.arrive(full_out, count=1)
        po = po ^ 1
        request, lo, hi, end, split = step_on(request, split, after, after_lo, after_hi, after_end)
    gdc_launch_dependents()  # the merge (decode/merge/kernel.py)
