# SPDX-License-Identifier: Apache-2.0
"""The warp that asks for the cache tiles of a part of the plan, across its requests."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from mla_kernels.decode.hopper.layouts import BLOCK
from mla_kernels.decode.hopper.rings import ring_next
from mla_kernels.decode.hopper.segments import next_segment, start_segment, step_on
from mla_kernels.decode.triton.many_rows.stream import page_of
from mla_kernels.triton_common.gluon_compat import reinterpret, tma_load

# A row's 128 bytes in one of the tile's four blocks of 64 units: swizzled within themselves.
LINE = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
LANES = gl.constexpr(gl.BlockedLayout([2], [32], [1], [0]))


@gluon.jit
def clear_rows_past(ring, slot, left, SLOTS: gl.constexpr):
    """Zero the latent rows of a tile at or past `left`: 0 * NaN would reach O."""
    BLOCKS: gl.constexpr = ring.shape[2] // 64
    lines = reinterpret(ring, ring.dtype, [SLOTS * BLOCKS * BLOCK, 64], LINE)
    zeros = gl.zeros([64], ring.dtype, LANES)
    for row in range(left, BLOCK):
        for block in gl.static_range(BLOCKS):
            lines.index((slot * BLOCKS + block) * BLOCK + row).store(zeros)


@gluon.jit
def loader(
    start, seq_lens, requests, table, table_stride, kv_desc, kv_rope_desc, ring, rope_ring,
    full, empty, landed, SLOTS: gl.constexpr, TEAMS: gl.constexpr, CHUNKED: gl.constexpr,
):  # fmt: skip
    """Ask for a tile when its place becomes free. That of a request's end, if it is not whole, is
    handed on when its other rows are zeros."""
    WIDTH: gl.constexpr = ring.shape[2]
    BYTES: gl.constexpr = BLOCK * (WIDTH + rope_ring.shape[2]) * 2
    plan, request, lo, hi, end, split = start_segment(
        start, seq_lens, requests, table, table_stride, CHUNKED
    )
    i = gl.to_tensor(0)  # of the team that the next tile goes to, and of the other
    phase = gl.to_tensor(1)
    i_other = gl.to_tensor(0)
    phase_other = gl.to_tensor(1)
    phase_landed = gl.to_tensor(0)
    page = page_of(plan, request, lo)
    while request <= plan.last:
        length = gl.load(seq_lens + request)
        after, after_lo, after_hi, after_end = next_segment(plan, request, hi, end)
        for n in range(lo, hi):
            row = page * BLOCK
            more = n + 1 < hi
            page = page_of(plan, gl.where(more, request, after), gl.where(more, n + 1, after_lo))
            left = length - n * BLOCK
            team = (n - lo) % TEAMS
            at = team * SLOTS + i
            mbarrier.wait(empty.index(at), phase)
            if left >= BLOCK:
                mbarrier.expect(full.index(at), BYTES)
                tma_load(kv_desc, [row, 0], full.index(at), ring.index(at))
                tma_load(kv_rope_desc, [row, WIDTH], full.index(at), rope_ring.index(at))
            else:
                mbarrier.expect(landed, BYTES)
                tma_load(kv_desc, [row, 0], landed, ring.index(at))
                tma_load(kv_rope_desc, [row, WIDTH], landed, rope_ring.index(at))
                mbarrier.wait(landed, phase_landed)
                phase_landed = phase_landed ^ 1
                clear_rows_past(ring, at, left, TEAMS * SLOTS)
                fence_async_shared()
                mbarrier.arrive(full.index(at), count=1)
            i, phase = ring_next(i, phase, SLOTS)
            if TEAMS == 2:
                i, i_other = i_other, i
                phase, phase_other = phase_other, phase
        if TEAMS == 2:  # a segment begins with the first team
            odd = (hi - lo) % 2 == 1
            i, i_other = gl.where(odd, i_other, i), gl.where(odd, i, i_other)
            phase, phase_other = (
                gl.where(odd, phase_other, phase), gl.where(odd, phase, phase_other)
            )  # fmt: skip
        request, lo, hi, end, split = step_on(request, split, after, after_lo, after_hi, after_end)
