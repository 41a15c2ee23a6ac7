# SPDX-License-Identifier: Apache-2.0
"""Warpgroup 0 of the stream (stream.py): that of scores.py, token after token."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma_wait,
)

from mla_kernels.decode.hopper.bf16.loads import take_query
from mla_kernels.decode.hopper.layouts import BLOCK, SCORES_COL, SCORES_ROW
from mla_kernels.decode.hopper.rings import ring_next, ring_previous
from mla_kernels.decode.hopper.softmax import EXPONENT_FLOOR
from mla_kernels.sparse.hopper.layouts import SUMS
from mla_kernels.sparse.hopper.scales import load_scalar, store_scalar
from mla_kernels.sparse.hopper.scores import issue_scores
from mla_kernels.sparse.hopper.softmax import softmax_step
from mla_kernels.sparse.hopper.sums import LN2, LOG2E, store_sums
from mla_kernels.sparse.hopper.walk import part_of, program_walk, row_of


@gluon.jit
def scores_stream_warpgroup(
    num_tokens, K, span, splits, num_heads, scale_log2, sink, lse, max_logits, part_sums, q_shared,
    ring_a, ring_b, ring_r, offsets, counts, num_tiles, full_a, full_b, full_v, full_q, p_ring,
    full_p_a, full_p_b, empty_p, factors, inverse, full_out, empty_out,
    SLOTS_A: gl.constexpr, SLOTS_B: gl.constexpr, SLOTS_R: gl.constexpr, SLOTS_P: gl.constexpr,
    HAS_SINK: gl.constexpr, MAX_LOGITS: gl.constexpr, SHARES: gl.constexpr,
):  # fmt: skip
    ia = gl.to_tensor(0)
    pa = gl.to_tensor(0)
    ib = gl.to_tensor(0)  # of ring R too
    pb = gl.to_tensor(0)
    ip = gl.to_tensor(0)
    pp = gl.to_tensor(1)
    po = gl.to_tensor(1)  # of empty_out; not which place of num_tiles
    gl.static_assert(SLOTS_R == SLOTS_B)
    head = gl.program_id(1) * BLOCK + gl.arange(0, BLOCK, SCORES_ROW)
    ok = head < num_heads
    walk = program_walk(num_tokens, K, span, SHARES)
    if HAS_SINK and not SHARES:
        logit = gl.load(sink + head, mask=ok, other=0.0)
    for token in range(walk.first, walk.end, walk.step):
        # The query is the token's first item: to registers, but for 128 columns that stay shared.
        mbarrier.wait(full_a.index(ia), pa)
        tiles = load_scalar(counts.index(ia))
        mbarrier.wait(full_v.index(ib), pb)
        mbarrier.wait(full_b.index(ib), pb)
        store_scalar(num_tiles.index(po ^ 1), tiles)
        q_a, q_b, q_rope = take_query(
            ring_a.index(ia), ring_b.index(ib), ring_r.index(ib), q_shared
        )
        mbarrier.arrive(full_q, count=1)
        ia, pa = ring_next(ia, pa, SLOTS_A)
        ib, pb = ring_next(ib, pb, SLOTS_B)

        k = gl.full([BLOCK], EXPONENT_FLOOR, gl.float32, SCORES_ROW)
        l = gl.zeros([BLOCK, 8], gl.float32, SUMS)
        top = gl.full([BLOCK], -float("inf"), gl.float32, SCORES_ROW)
        for n in range(tiles):
            mbarrier.wait(full_b.index(ib), pb)
            token_s = issue_scores(
                q_a, q_b, q_rope, q_shared, ring_a, ring_b, ring_r, full_a, ia, pa, ib, ib, True
            )
            mbarrier.arrive(full_p_a.index(ring_previous(ip, SLOTS_P)), count=1, pred=n > 0)
            mbarrier.wait(full_v.index(ib), pb)
            offset = offsets.index(ib).load(SCORES_COL)
            s = warpgroup_mma_wait(0, deps=(token_s,))
            ia, pa = ring_next(ia, pa, SLOTS_A)
            ib, pb = ring_next(ib, pb, SLOTS_B)
            p, factor, k, l, top = softmax_step(
                s, offset, 1.0, k, l, top, scale_log2, MAX_LOGITS, False
            )
            mbarrier.wait(empty_p.index(ip), pp)
            p_ring.index(ip).store(p)
            factors.index(ip).store(factor)
            fence_async_shared()
            mbarrier.arrive(full_p_b.index(ip), count=1)  # warpgroup 2 starts PV(n)
            ip, pp = ring_next(ip, pp, SLOTS_P)
        mbarrier.arrive(full_p_a.index(ring_previous(ip, SLOTS_P)), count=1)

        if SHARES:
            part = part_of(walk, token, splits)
            store_sums(
                k, l, top, part, token, gl.program_id(1) * BLOCK, num_heads, part_sums,
                max_logits, MAX_LOGITS,
            )  # fmt: skip
        else:
            total = gl.convert_layout(gl.sum(l, 1), SCORES_ROW)
            row = row_of(token, num_heads) + head
            mbarrier.wait(empty_out, po)
            seen = total != 0.0  # NaN too
            with_sink = total
            if HAS_SINK:
                with_sink = total + gl.exp2(logit * LOG2E - k)
            inverse.store(gl.where(seen, 1.0 / with_sink, 0.0))
            mbarrier.arrive(full_out, count=1)
            value = gl.where(seen, (k + gl.log2(total)) * LN2, -float("inf"))
            gl.store(lse + row, value, mask=ok)
            if MAX_LOGITS:
                gl.store(max_logits + row, top * LN2, mask=ok)
        po = po ^ 1
