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

from mla_kernels.decode.hopper.fp8.query import times
from mla_kernels.decode.hopper.layouts import (
    BLOCK,
    HALF,
    PASS_128,
    QUERY,
    QUERY_TILE,
    ROPE,
    SCORES,
    SCORES_COL,
    SCORES_ROW,
)
from mla_kernels.decode.hopper.rings import ring_next, ring_previous
from mla_kernels.decode.hopper.scales import one_over
from mla_kernels.decode.hopper.softmax import EXPONENT_FLOOR
from mla_kernels.sparse.hopper.gather import count_tiles, program_rows, program_token
from mla_kernels.sparse.hopper.layouts import SUMS
from mla_kernels.sparse.hopper.query import convert_query
from mla_kernels.sparse.hopper.scales import load_scalar, store_scalar
from mla_kernels.sparse.hopper.softmax import softmax_step
from mla_kernels.sparse.hopper.sums import store_sums, store_whole_sums
from mla_kernels.sparse.hopper.walk import part_of, program_walk, walk_rows
from mla_kernels.triton_common.gluon_compat import reinterpret, tma_load


@gluon.jit
def load_query(q_desc, q_rope_desc, token, first_head, landed_q, tile_a, tile_b, tile_r):
    """The query tile of a program, asynchronous; rows past the last head are zero."""
    token = token.to(gl.int32)
    mbarrier.expect(landed_q, BLOCK * (2 * HALF + ROPE) * 2)
    box_a = reinterpret(tile_a, gl.bfloat16, [1, BLOCK, HALF], QUERY_TILE)
    tma_load(q_desc, [token, first_head, 0], landed_q, box_a)
    box_b = reinterpret(tile_b, gl.bfloat16, [1, BLOCK, HALF], QUERY_TILE)
    tma_load(q_desc, [token, first_head, HALF], landed_q, box_b)
    box_r = reinterpret(tile_r, gl.bfloat16, [1, BLOCK, ROPE], QUERY_TILE)
    tma_load(q_rope_desc, [token, first_head, 0], landed_q, box_r)


@gluon.jit
def issue_scores(
    q_a, q_b, q_rope, q_shared, ring_a, ring_b, ring_r, full_a, ia, pa, ib, ir, FENCE: gl.constexpr
):
    """Q K^T of one tile, asynchronous; ring B's and R's have landed. FENCE: the tiles were written
    by copies that the writers did not fence."""
    s = gl.zeros([BLOCK, BLOCK], gl.float32, SCORES)
    if FENCE:
        fence_async_shared()
    b = ring_b.index(ib)
    b_k = b.slice(0, 128, dim=1).permute((1, 0))
    s = warpgroup_mma(q_b, b_k, s, use_acc=False, is_async=True)
    s = warpgroup_mma(q_shared, b.slice(128, 128, dim=1).permute((1, 0)), s, is_async=True)
    s = warpgroup_mma(q_rope, ring_r.index(ir).permute((1, 0)), s, is_async=True)
    mbarrier.wait(full_a.index(ia), pa)
    if FENCE:
        fence_async_shared()
    return warpgroup_mma(q_a, ring_a.index(ia).permute((1, 0)), s, is_async=True)


@gluon.jit
def score_range(
    q_desc, q_rope_desc, token, first_head, rows, num_heads, scale_log2, q_shared, ring_a, ring_b,
    ring_r, offsets, m_ring, num_tiles, full_a, full_b, full_v, landed_q, full_q, phase, p_ring,
    full_p_a, full_p_b, empty_p, factors, ia, pa, ib, pb, ir, pr, ip, pp,
    SLOTS_A: gl.constexpr, SLOTS_B: gl.constexpr, SLOTS_R: gl.constexpr, SLOTS_P: gl.constexpr,
    MAX_LOGITS: gl.constexpr, FP8: gl.constexpr,
):  # fmt: skip
    """Hand over P of a range of a token's slots. Returns (k, l, largest scores) and the places in
    the rings behind it; `phase` of landed_q."""
    # By way of the last free slot of each ring to registers, but for 128 columns that stay shared.
    tile_a, tile_b, tile_r = (
        ring_a.index(ring_previous(ia, SLOTS_A)),
        ring_b.index(ring_previous(ib, SLOTS_B)),
        ring_r.index(ring_previous(ir, SLOTS_R)),
    )
    load_query(q_desc, q_rope_desc, token, first_head, landed_q, tile_a, tile_b, tile_r)
    tiles = count_tiles(rows)
    store_scalar(num_tiles, tiles)
    mbarrier.wait(landed_q, phase)
    if FP8:
        down, up = convert_query(tile_a, tile_b, tile_r, num_heads)
    q_a = tile_a.load(QUERY)
    q_b = tile_b.slice(0, 128, dim=1).load(QUERY)
    q_rope = tile_r.load(QUERY)
    if FP8:
        q_rope = times(q_rope, down)
        scale_log2 = scale_log2 * up
    q_shared.store(tile_b.slice(128, 128, dim=1).load(PASS_128))
    fence_async_shared()
    mbarrier.arrive(full_q, count=1)

    k = gl.full([BLOCK], EXPONENT_FLOOR, gl.float32, SCORES_ROW)
    l = gl.zeros([BLOCK, 8], gl.float32, SUMS)
    top = gl.full([BLOCK], -float("inf"), gl.float32, SCORES_ROW)
    m = gl.to_tensor(1.0)
    for n in range(tiles):
        mbarrier.wait(full_b.index(ib), pb)
        if FP8:
            m_before = m
            m = load_scalar(m_ring.index(ir))
            if m != m_before:
                q_rope = times(q_rope, m_before * one_over(m))
        token_s = issue_scores(
            q_a, q_b, q_rope, q_shared, ring_a, ring_b, ring_r, full_a, ia, pa, ib, ir, not FP8
        )
        if not FP8:
            mbarrier.arrive(full_p_a.index(ring_previous(ip, SLOTS_P)), count=1, pred=n > 0)
            mbarrier.wait(full_v.index(ir), pr)
        offset = offsets.index(ir).load(SCORES_COL)
        s = warpgroup_mma_wait(0, deps=(token_s,))
        ia, pa = ring_next(ia, pa, SLOTS_A)
        ib, pb = ring_next(ib, pb, SLOTS_B)
        ir, pr = ring_next(ir, pr, SLOTS_R)
        p, factor, k, l, top = softmax_step(s, offset, m, k, l, top, scale_log2, MAX_LOGITS, FP8)
        mbarrier.wait(empty_p.index(ip), pp)
        p_ring.index(ip).store(p)
        factors.index(ip).store(factor)
        fence_async_shared()
        if FP8:
            mbarrier.arrive(full_p_a.index(ip), count=1)
        mbarrier.arrive(full_p_b.index(ip), count=1)  # warpgroup 2 starts PV(n)
        ip, pp = ring_next(ip, pp, SLOTS_P)
    if not FP8:
        mbarrier.arrive(full_p_a.index(ring_previous(ip, SLOTS_P)), count=1)
    return k, l, top, ia, pa, ib, pb, ir, pr, ip, pp


@gluon.jit
def scores_warpgroup(
    q_desc, q_rope_desc, slots, slots_stride, lengths, K, span, splits, num_tokens, num_slots,
    page_stride, num_heads, scale_log2, sink, lse, max_logits, part_sums, q_shared, ring_a, ring_b,
    ring_r, offsets, m_ring, num_tiles, full_a, full_b, full_v, landed_q, full_q, p_ring, full_p_a,
    full_p_b, empty_p, factors, inverse, full_out,
    SLOTS_A: gl.constexpr, SLOTS_B: gl.constexpr, SLOTS_R: gl.constexpr, SLOTS_P: gl.constexpr,
    PAGE: gl.constexpr, ROW: gl.constexpr, HAS_LENGTHS: gl.constexpr, HAS_SINK: gl.constexpr,
    SPLIT: gl.constexpr, SHARES: gl.constexpr, MAX_LOGITS: gl.constexpr, FP8: gl.constexpr,
):  # fmt: skip
    """Unless FP8, warpgroup 1 gets P(n-1) only when Q K(n) is issued, so that its half of PV(n-1)
    fills the tensor cores while this warpgroup is busy with softmax(n)."""
    ia = gl.to_tensor(0)
    pa = gl.to_tensor(0)
    ib = gl.to_tensor(0)
    pb = gl.to_tensor(0)
    ir = gl.to_tensor(0)
    pr = gl.to_tensor(0)
    ip = gl.to_tensor(0)
    pp = gl.to_tensor(1)
    phase = gl.to_tensor(0)
    if SHARES:
        walk = program_walk(num_tokens, K, span, SHARES)
        first_head = gl.program_id(1) * BLOCK
        for token in range(walk.first, walk.end):
            rows = walk_rows(
                walk, token, slots, slots_stride, lengths, K, num_slots, page_stride,
                PAGE, ROW, HAS_LENGTHS,
            )  # fmt: skip
            # Both have read all P, so that the rings are free and num_tiles is read.
            mbarrier.wait(empty_p.index(ip), pp)
            after_ip, after_pp = ring_next(ip, pp, SLOTS_P)
            mbarrier.wait(empty_p.index(after_ip), after_pp)
            k, l, top, ia, pa, ib, pb, ir, pr, ip, pp = score_range(
                q_desc, q_rope_desc, token, first_head, rows, num_heads, scale_log2, q_shared,
                ring_a, ring_b, ring_r, offsets, m_ring, num_tiles, full_a, full_b, full_v,
                landed_q, full_q, phase, p_ring, full_p_a, full_p_b, empty_p, factors,
                ia, pa, ib, pb, ir, pr, ip, pp,
                SLOTS_A, SLOTS_B, SLOTS_R, SLOTS_P, MAX_LOGITS, FP8,
            )  # fmt: skip
            phase = phase ^ 1
            part = part_of(walk, token, splits)
            store_sums(
                k, l, top, part, token, first_head, num_heads, part_sums, max_logits, MAX_LOGITS
            )
    else:
        token, first_head = program_token(num_heads)
        rows = program_rows(
            slots, slots_stride, lengths, K, span, token, num_slots, page_stride,
            PAGE, ROW, HAS_LENGTHS,
        )  # fmt: skip
        k, l, top, ia, pa, ib, pb, ir, pr, ip, pp = score_range(
            q_desc, q_rope_desc, token, first_head, rows, num_heads, scale_log2, q_shared,
            ring_a, ring_b, ring_r, offsets, m_ring, num_tiles, full_a, full_b, full_v,
            landed_q, full_q, phase, p_ring, full_p_a, full_p_b, empty_p, factors,
            ia, pa, ib, pb, ir, pr, ip, pp,
            SLOTS_A, SLOTS_B, SLOTS_R, SLOTS_P, MAX_LOGITS, FP8,
        )  # fmt: skip
        if SPLIT:
            part = token * gl.num_programs(1) + gl.program_id(1)
            store_sums(
                k, l, top, part, token, first_head, num_heads, part_sums, max_logits, MAX_LOGITS
            )
        else:
            store_whole_sums(
                k, l, top, token, first_head, num_heads, sink, lse, max_logits, inverse, full_out,
                HAS_SINK, MAX_LOGITS,
            )  # fmt: skip
