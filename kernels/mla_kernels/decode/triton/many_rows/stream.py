# SPDX-License-Identifier: Apache-2.0
"""The warp that asks for the queries and cache tiles of a part of the plan, across its requests."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from mla_kernels.decode.hopper.layouts import BLOCK, HALF, QUERY_TILE, ROPE
from mla_kernels.decode.hopper.rings import ring_next
from mla_kernels.decode.hopper.segments import next_segment, start_segment, step_on
from mla_kernels.triton_common.gluon_compat import reinterpret, tma_load

HALF_BYTES = gl.constexpr(BLOCK.value * HALF.value * 2)
ROPE_BYTES = gl.constexpr(BLOCK.value * ROPE.value * 2)


@gluon.jit
def page_of(plan, request, tile):
    """The cache page of a tile; past the part's last request that of some tile of it."""
    row = plan.table + gl.minimum(request, plan.last).to(gl.int64) * plan.table_stride
    return gl.load(row + tile)


@gluon.jit
def load_query(q_desc, q_rope_desc, request, q_a, q_b, q_r, full):
    """Ask for a request's rows of this program; rows past its last are zero."""
    first = gl.program_id(0) * BLOCK
    mbarrier.expect(full, 2 * HALF_BYTES + ROPE_BYTES)
    half = reinterpret(q_a.index(0), q_a.dtype, [1, BLOCK, HALF], QUERY_TILE)
    tma_load(q_desc, [request, first, 0], full, half)
    half = reinterpret(q_b.index(0), q_b.dtype, [1, BLOCK, HALF], QUERY_TILE)
    tma_load(q_desc, [request, first, HALF], full, half)
    rope = reinterpret(q_r.index(0), q_r.dtype, [1, BLOCK, ROPE], QUERY_TILE)
    tma_load(q_rope_desc, [request, first, 0], full, rope)


@gluon.jit
def loader(
    start, seq_lens, requests, table, table_stride, q_desc, q_rope_desc, kv_desc, kv_rope_desc,
    q_a, q_b, q_r, ring_a, ring_b, ring_r, full_q, empty_q, full_a, empty_a, full_b, empty_b,
    CHUNKED: gl.constexpr,
):  # fmt: skip
    """Ask for each half of a tile, and for a query, when its place becomes free."""
    plan, request, lo, hi, end, split = start_segment(
        start, seq_lens, requests, table, table_stride, CHUNKED
    )
    i = gl.to_tensor(0)
    phase = gl.to_tensor(1)
    phase_q = gl.to_tensor(1)
    page = page_of(plan, request, lo)
    while request <= plan.last:
        after, after_lo, after_hi, after_end = next_segment(plan, request, hi, end)
        for n in range(lo, hi):
            row = page * BLOCK
            more = n + 1 < hi
            page = page_of(plan, gl.where(more, request, after), gl.where(more, n + 1, after_lo))
            mbarrier.wait(empty_a.index(i), phase)
            mbarrier.expect(full_a.index(i), HALF_BYTES)
            tma_load(kv_desc, [row, 0], full_a.index(i), ring_a.index(i))
            mbarrier.wait(empty_b.index(i), phase)
            mbarrier.expect(full_b.index(i), HALF_BYTES + ROPE_BYTES)
            tma_load(kv_desc, [row, HALF], full_b.index(i), ring_b.index(i))
            tma_load(kv_rope_desc, [row, 2 * HALF], full_b.index(i), ring_r.index(i))
            if n == lo:
                mbarrier.wait(empty_q, phase_q)
                load_query(q_desc, q_rope_desc, request, q_a, q_b, q_r, full_q)
            i, phase = ring_next(i, phase, 2)
        phase_q = phase_q ^ 1
        request, lo, hi, end, split = step_on(request, split, after, after_lo, after_hi, after_end)
