# SPDX-License-Identifier: Apache-2.0
"""Warpgroup 0: S = Q K^T in fp8, the softmax, and P handed to the two value warpgroups."""

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
from mla_kernels.decode.hopper.fp8_query.operands import (
    ACCUMULATOR,
    LATENT_CODES,
    QUERY_LATENT,
    QUERY_ROPE,
    ROPE_CODES,
)
from mla_kernels.decode.hopper.fp8_query.softmax import lane_sums, lowest, move_reference, weights
from mla_kernels.decode.hopper.layouts import BLOCK, QUADS, SCORES_ROW
from mla_kernels.decode.hopper.rings import ring_next
from mla_kernels.decode.hopper.segments import next_segment, start_segment, step_on
from mla_kernels.decode.hopper.softmax import of_rows, publish_factors, sums_of_rows
from mla_kernels.triton_common.gluon_compat import cta_barrier, reinterpret, tma_load

LN2 = gl.constexpr(numerics.LN2)
EXPONENT_FLOOR = gl.constexpr(numerics.EXPONENT_FLOOR)
ROW = gl.constexpr(gl.SliceLayout(1, ACCUMULATOR.value))
COL = gl.constexpr(gl.SliceLayout(0, ACCUMULATOR.value))


@gluon.jit
def load_query(q_desc, q_rope_desc, request, query, rope, full, ok):
    """Ask for a request's rows of this program; rows past its last are zero."""
    row = gl.program_id(0) * BLOCK
    mbarrier.expect(full, BLOCK * 576, pred=ok)
    box = reinterpret(query, gl.bfloat16, [1, BLOCK, 256], QUERY_LATENT)
    tma_load(q_desc, [request, row, 0], full, box, pred=ok)
    box = reinterpret(rope, gl.bfloat16, [1, BLOCK, 32], QUERY_ROPE)
    tma_load(q_rope_desc, [request, row, 256], full, box, pred=ok)


@gluon.jit
def issue_scores(query, rope, ring_a, ring_b, rope_ring, full_a, full_b, i, phase):
    """Q K^T of one tile, asynchronous."""
    s = gl.zeros([BLOCK, BLOCK], gl.float32, ACCUMULATOR)
    mbarrier.wait(full_a.index(i), phase)
    keys = reinterpret(ring_a.index(i), gl.float8e4nv, [BLOCK, 256], LATENT_CODES)
    part = query.slice(0, 256, dim=1)
    s = warpgroup_mma(part, keys.permute((1, 0)), s, use_acc=False, is_async=True)
    mbarrier.wait(full_b.index(i), phase)
    keys = reinterpret(ring_b.index(i), gl.float8e4nv, [BLOCK, 256], LATENT_CODES)
    part = query.slice(256, 256, dim=1)
    s = warpgroup_mma(part, keys.permute((1, 0)), s, is_async=True)
    keys = reinterpret(rope_ring.index(i), gl.float8e4nv, [BLOCK, 64], ROPE_CODES)
    return warpgroup_mma(rope, keys.permute((1, 0)), s, is_async=True)


@gluon.jit
def seen_scores(s, n, limit):
    """-inf where a row may not see a key of tile n."""
    col = n * BLOCK + gl.arange(0, BLOCK, COL)
    return gl.where(col[None, :] < limit[:, None], s, -float("inf"))


@gluon.jit
def publish(x, l, factor, p_ring, factors, lows, full_p, empty_p, ip, pp):
    """P of a tile for the value warpgroups. Returns l'."""
    mbarrier.wait(empty_p.index(ip), pp)
    p = weights(x)
    p_ring.index(ip).store(p)
    publish_factors(factors.index(ip), factor)
    lows.index(ip).store(lowest(factor))
    fence_async_shared()
    mbarrier.arrive(full_p.index(ip), count=1)
    return l * factor + lane_sums(p)


@gluon.jit
def scores_warpgroup(
    q_desc, q_rope_desc, q_scale, kv_scale,
    start, requests, seq_lens, table, table_stride, lse, part_sums, scale_log2,
    query_units, rope_units, full_q, ring_a, ring_b, rope_ring, full_a, full_b,
    p_ring, factors, lows, full_p, empty_p, inverse, limits, full_out, empty_out,
    num_rows, num_heads, s_q,
    SLOTS: gl.constexpr, SLOTS_P: gl.constexpr,
    LOAD_Q_SCALE: gl.constexpr, LOAD_SCALE: gl.constexpr,
    CAUSAL: gl.constexpr, CHUNKED: gl.constexpr,
):  # fmt: skip
    cache_scale = gl.to_tensor(1.0)
    if LOAD_SCALE:
        cache_scale = gl.load(kv_scale)
    else:
        cache_scale = kv_scale
    if LOAD_Q_SCALE:
        scale_log2 = scale_log2 * gl.load(q_scale)
    else:
        scale_log2 = scale_log2 * q_scale
    scale_log2 = scale_log2 * cache_scale
    query = reinterpret(query_units, gl.float8e4nv, [BLOCK, 512], LATENT_CODES)
    rope = reinterpret(rope_units, gl.float8e4nv, [BLOCK, 64], ROPE_CODES)
    first_row = gl.program_id(0) * BLOCK
    i = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    ip = gl.to_tensor(0)
    pp = gl.to_tensor(1)
    po = gl.to_tensor(1)
    pq = gl.to_tensor(0)
    row = gl.arange(0, BLOCK, ROW)
    plan, request, lo, hi, end, split = start_segment(
        start, seq_lens, requests, table, table_stride, CHUNKED
    )
    load_query(q_desc, q_rope_desc, request, query_units, rope_units, full_q, request <= plan.last)
    while request <= plan.last:
        length = gl.load(seq_lens + request)
        k = gl.full([BLOCK, 4], EXPONENT_FLOOR, gl.float32, QUADS)
        l = gl.zeros([BLOCK, 4], gl.float32, QUADS)
        # Row r may see keys below `limit`; tiles below `unmasked` need no mask at all.
        unmasked = length // BLOCK
        if CAUSAL:
            limits.store(length - (s_q - 1) + (first_row + row) // num_heads)
            unmasked = (length - (s_q - 1)) // BLOCK
        mbarrier.wait(full_q, pq)
        pq = pq ^ 1
        token = issue_scores(query, rope, ring_a, ring_b, rope_ring, full_a, full_b, i, phase)
        i, phase = ring_next(i, phase, SLOTS)
        for n in range(lo, hi - 1):
            s = warpgroup_mma_wait(0, deps=(token,))
            if CAUSAL:  # noqa: SIM102 (one is known to the compiler)
                if n >= unmasked:
                    s = seen_scores(s, n, limits.load(ROW))
            x, factor, k = move_reference(s, k, scale_log2)
            # The next tile's scores run under this one's softmax.
            token = issue_scores(query, rope, ring_a, ring_b, rope_ring, full_a, full_b, i, phase)
            i, phase = ring_next(i, phase, SLOTS)
            l = publish(x, l, factor, p_ring, factors, lows, full_p, empty_p, ip, pp)
            ip, pp = ring_next(ip, pp, SLOTS_P)
        after, after_lo, after_hi, after_end = next_segment(plan, request, hi, end)
        s = warpgroup_mma_wait(0, deps=(token,))
        cta_barrier()
        load_query(q_desc, q_rope_desc, after, query_units, rope_units, full_q, after <= plan.last)
        if hi > unmasked:
            if CAUSAL:
                s = seen_scores(s, hi - 1, limits.load(ROW))
            else:
                s = seen_scores(s, hi - 1, gl.full([BLOCK], 0, gl.int32, ROW) + length)
        x, factor, k = move_reference(s, k, scale_log2)
        l = publish(x, l, factor, p_ring, factors, lows, full_p, empty_p, ip, pp)
        ip, pp = ring_next(ip, pp, SLOTS_P)

        slot = gl.load(requests + request * 4 + 0)
        splits = gl.load(requests + request * 4 + 1)
        total = sums_of_rows(l)
        reference = of_rows(k)
        seen = total != 0.0  # NaN too
        mbarrier.wait(empty_out, po)
        at = first_row + gl.arange(0, BLOCK, SCORES_ROW)
        row_ok = at < num_rows
        if splits == 1:
            inverse.store(gl.where(seen, 1.0 / total, 0.0) * cache_scale)
            value = gl.where(seen, (reference + gl.log2(total)) * LN2, -float("inf"))
            gl.store(lse + request * num_rows + at, value, mask=row_ok)
        else:
            inverse.store(gl.full([BLOCK], 1.0, gl.float32, SCORES_ROW) * cache_scale)
            at = ((slot + split) * num_rows + at) * 2
            gl.store(part_sums + at, total, mask=row_ok)
            gl.store(part_sums + at + 1, reference, mask=row_ok)
        mbarrier.arrive(full_out, count=1)
        po = po ^ 1
        request, lo, hi, end, split = step_on(request, split, after, after_lo, after_hi, after_end)
    gdc_launch_dependents()  # the merge (decode/merge/kernel.py)
