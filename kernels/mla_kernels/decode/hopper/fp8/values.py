# SPDX-License-Identifier: Apache-2.0
"""Warpgroups 1 and 2: each owns 256 latent columns of O^T, adds V^T P^T to them, and loads its half
of the cache."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
)

from mla_kernels.decode.hopper.fp8.loads import first_place, load_half
from mla_kernels.decode.hopper.fp8.operands import accumulator
from mla_kernels.decode.hopper.fp8.products import add_values
from mla_kernels.decode.hopper.gluon_compat import cta_barrier
from mla_kernels.decode.hopper.layouts import BLOCK, PASS_64, PASS_64_ROW
from mla_kernels.decode.hopper.stream import (
    next_segment,
    ring_next,
    start_segment,
)


@gluon.jit
def clear_rows_past(tile, left):
    """Zero the rows of a tile at or past `left`: 0 * NaN would reach O."""
    row = gl.arange(0, BLOCK, PASS_64_ROW)
    for c in gl.static_range(2):
        part = tile.slice(c * 64, 64, dim=1)
        part.store(gl.where((row < left)[:, None], part.load(PASS_64), 0.0))
    fence_async_shared()
    cta_barrier()


@gluon.jit
def rescale(o_a, o_b, o_c, o_d, factors, moved, N: gl.constexpr):
    """O at the new references, if one has moved."""
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    if gl.max(moved.load(ONE), 0) != 0:
        factor = factors.load(gl.SliceLayout(0, accumulator(N)))[None, :]
        o_a = o_a * factor
        o_b = o_b * factor
        o_c = o_c * factor
        o_d = o_d * factor
    return o_a, o_b, o_c, o_d


@gluon.jit
def store_group(
    o_a, o_b, out, part_acc, request, slot, split, splits, num_rows,
    COL: gl.constexpr, N: gl.constexpr,
):  # fmt: skip
    """Write 128 columns of a segment's O, from even and odd ones."""
    LATENT: gl.constexpr = 512
    o = gl.join(o_a, o_b)  # [units, N, 2]
    L: gl.constexpr = o.type.layout
    unit = gl.arange(0, 64, gl.SliceLayout(1, gl.SliceLayout(2, L)))
    row = gl.arange(0, N, gl.SliceLayout(0, gl.SliceLayout(2, L)))
    odd = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, L)))
    row = gl.expand_dims(gl.expand_dims(row, 0), 2)
    column = gl.expand_dims(gl.expand_dims(unit, 1), 2) * 2
    column = COL + column + gl.expand_dims(gl.expand_dims(odd, 0), 1)
    at = row * LATENT + column
    first = gl.program_id(0) * N
    row_ok = row < num_rows - first
    if splits == 1:
        whole = out + (request.to(gl.int64) * num_rows + first) * LATENT
        gl.store(whole + at, o.to(gl.bfloat16), mask=row_ok)
    else:
        partial = part_acc + ((slot + split).to(gl.int64) * num_rows + first) * LATENT
        gl.store(partial + at, o, mask=row_ok)


@gluon.jit
def values_warpgroup(
    out, part_acc, kv_desc, rope_desc, scale_desc, table, table_stride, start, requests, seq_lens,
    ring, rope_ring, scale_ring, full, p_ring, factors, moved, ratios, full_p, empty_p,
    inverse, full_out, empty_out, num_rows,
    COL: gl.constexpr, ROPE_COL: gl.constexpr, N: gl.constexpr, STEP: gl.constexpr,
    SLOTS: gl.constexpr, SLOTS_P: gl.constexpr, PENDING: gl.constexpr, GROUPED: gl.constexpr,
    CHUNKED: gl.constexpr,
):  # fmt: skip
    GROUP: gl.constexpr = COL // 64
    i = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    ip = gl.to_tensor(0)
    pp = gl.to_tensor(0)
    po = gl.to_tensor(0)
    plan, request, lo, hi, end, split = start_segment(
        start, seq_lens, requests, table, table_stride, CHUNKED
    )
    c = first_place(plan, request, lo, hi, end, STEP)
    for j in gl.static_range(SLOTS):
        c = load_half(
            c, plan, kv_desc, rope_desc, scale_desc, ring, rope_ring, scale_ring, full, j,
            COL, ROPE_COL, STEP, GROUPED,
        )  # fmt: skip
    while request <= plan.last:
        length = gl.load(seq_lens + request)
        slot = gl.load(requests + request * 4 + 0)
        splits = gl.load(requests + request * 4 + 1)
        after, after_lo, after_hi, after_end = next_segment(plan, request, hi, end)
        o_a = gl.zeros([64, N], gl.float32, accumulator(N))
        o_b = gl.zeros([64, N], gl.float32, accumulator(N))
        o_c = gl.zeros([64, N], gl.float32, accumulator(N))
        o_d = gl.zeros([64, N], gl.float32, accumulator(N))
        for _n in range(lo, hi - STEP, STEP):
            mbarrier.wait(full_p.index(ip), pp)
            o_a, o_b, o_c, o_d = rescale(o_a, o_b, o_c, o_d, factors.index(ip), moved.index(ip), N)
            for t in gl.static_range(STEP):
                mbarrier.wait(full.index(i), phase)
                o_a, o_b, o_c, o_d = add_values(
                    o_a, o_b, o_c, o_d, ring.index(i), p_ring.index(ip * STEP + t),
                    ratios, ip * STEP + t, GROUP, N, PENDING, GROUPED,
                )  # fmt: skip
                c = load_half(
                    c, plan, kv_desc, rope_desc, scale_desc, ring, rope_ring, scale_ring, full, i,
                    COL, ROPE_COL, STEP, GROUPED,
                )  # fmt: skip
                i, phase = ring_next(i, phase, SLOTS)
            mbarrier.arrive(empty_p.index(ip), count=1)
            ip, pp = ring_next(ip, pp, SLOTS_P)

        # The last step is peeled: it may have rows behind the request's end.
        mbarrier.wait(full_p.index(ip), pp)
        o_a, o_b, o_c, o_d = rescale(o_a, o_b, o_c, o_d, factors.index(ip), moved.index(ip), N)
        first = lo + (hi - lo - 1) // STEP * STEP
        for t in gl.static_range(STEP):
            mbarrier.wait(full.index(i), phase)
            left = gl.minimum(length, hi * BLOCK) - (first + t) * BLOCK
            if left < BLOCK:
                clear_rows_past(ring.index(i), left)
            o_a, o_b, o_c, o_d = add_values(
                o_a, o_b, o_c, o_d, ring.index(i), p_ring.index(ip * STEP + t),
                ratios, ip * STEP + t, GROUP, N, PENDING, GROUPED,
            )  # fmt: skip
            c = load_half(
                c, plan, kv_desc, rope_desc, scale_desc, ring, rope_ring, scale_ring, full, i,
                COL, ROPE_COL, STEP, GROUPED,
            )  # fmt: skip
            i, phase = ring_next(i, phase, SLOTS)
        mbarrier.arrive(empty_p.index(ip), count=1)
        ip, pp = ring_next(ip, pp, SLOTS_P)

        mbarrier.wait(full_out, po)
        po = po ^ 1
        factor = inverse.load(gl.SliceLayout(0, accumulator(N)))[None, :]
        mbarrier.arrive(empty_out, count=1)
        store_group(
            o_a * factor, o_b * factor, out, part_acc, request, slot, split, splits, num_rows,
            2 * COL, N,
        )  # fmt: skip
        store_group(
            o_c * factor, o_d * factor, out, part_acc, request, slot, split, splits, num_rows,
            2 * COL + 128, N,
        )  # fmt: skip
        split = gl.where(after == request, split + 1, 0)
        request = after + 0
        lo = after_lo + 0
        hi = after_hi + 0
        end = after_end + 0
