# SPDX-License-Identifier: Apache-2.0
"""Warpgroups 1 and 2: each owns 256 latent columns of O^T, adds V^T P^T to them, and loads its half
of the cache."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
)

from mla_kernels.decode.hopper.fp8.loads import Place, load_half, page_of
from mla_kernels.decode.hopper.fp8.operands import accumulator
from mla_kernels.decode.hopper.fp8.products import add_values
from mla_kernels.decode.hopper.layouts import BLOCK, PASS_64, PASS_64_ROW
from mla_kernels.decode.hopper.rings import ring_next
from mla_kernels.decode.hopper.segments import next_segment, start_segment, step_on
from mla_kernels.triton_common.gluon_compat import cta_barrier


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
def column_halves(parts):
    """Each [64, n] of a tuple as two [64, n // 2]."""
    smaller = ()
    for i in gl.static_range(len(parts)):
        x = gl.reshape(parts[i], [64, 2, parts[i].shape[1] // 2])
        left, right = gl.split(gl.permute(x, (0, 2, 1)))
        smaller = smaller + (left, right)  # type: ignore  # noqa: RUF005
    return smaller


@gluon.jit
def eights(o):
    """[64, N] as N / 8 times [64, 8]."""
    N: gl.constexpr = o.shape[1]
    parts = column_halves((o,))
    if N > 16:
        parts = column_halves(parts)
    if N > 32:
        parts = column_halves(parts)
    return parts


@gluon.jit
def two_bf16(low, high):
    return gl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [low, high],
        dtype=gl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def two_fp32(low, high):
    return gl.inline_asm_elementwise(
        "mov.b64 $0, {$1, $2};", "=l,f,f", [low, high], dtype=gl.int64, is_pure=True, pack=1
    )


@gluon.jit
def store_group(
    o_a, o_b, out, part_acc, inverse, request, slot, split, splits, num_rows,
    COL: gl.constexpr, N: gl.constexpr,
):  # fmt: skip
    """Write 128 columns of a segment's O, from even and odd ones, 8 rows at a time, a pair of
    columns a store."""
    PAIRS: gl.constexpr = 256  # of columns, in a row
    parts_a = eights(o_a)
    parts_b = eights(o_b)
    L: gl.constexpr = parts_a[0].type.layout  # [units, rows]
    ROW: gl.constexpr = gl.SliceLayout(0, L)
    row = gl.arange(0, 8, ROW)[None, :]
    at = row * PAIRS + (COL // 2 + gl.arange(0, 64, gl.SliceLayout(1, L)))[:, None]
    first = gl.program_id(0) * N
    if splits == 1:
        whole = out.to(gl.pointer_type(gl.int32), bitcast=True)
        whole = whole + (request.to(gl.int64) * num_rows + first) * PAIRS + at
        for i in gl.static_range(N // 8):
            factor = inverse.slice(8 * i, 8).load(ROW)[None, :]
            pairs = two_bf16(parts_a[i] * factor, parts_b[i] * factor)
            gl.store(whole + 8 * i * PAIRS, pairs, mask=row + 8 * i < num_rows - first)
    else:
        partial = part_acc.to(gl.pointer_type(gl.int64), bitcast=True)
        partial = partial + ((slot + split).to(gl.int64) * num_rows + first) * PAIRS + at
        for i in gl.static_range(N // 8):
            factor = inverse.slice(8 * i, 8).load(ROW)[None, :]
            sums = two_fp32(parts_a[i] * factor, parts_b[i] * factor)
            gl.store(partial + 8 * i * PAIRS, sums, mask=row + 8 * i < num_rows - first)


@gluon.jit
def store_segment(
    sums, out, part_acc, inverse, full_out, empty_out, phase, request, slot, split, splits,
    num_rows, COL: gl.constexpr, N: gl.constexpr,
):  # fmt: skip
    """Write a warpgroup's columns of a segment's O, from COL units on, once 1 / l is there."""
    mbarrier.wait(full_out, phase)
    store_group(
        sums[0], sums[1], out, part_acc, inverse, request, slot, split, splits, num_rows,
        2 * COL, N,
    )  # fmt: skip
    store_group(
        sums[2], sums[3], out, part_acc, inverse, request, slot, split, splits, num_rows,
        2 * COL + 128, N,
    )  # fmt: skip
    mbarrier.arrive(empty_out, count=1)


@gluon.jit
def values_warpgroup(
    out, part_acc, kv_desc, rope_desc, scale_desc, table, table_stride, start, requests, seq_lens,
    ring, rope_ring, scale_ring, full, p_ring, factors, moved, ratios, full_p, empty_p,
    inverse, full_out, empty_out, num_rows,
    COL: gl.constexpr, ROPE_COL: gl.constexpr, N: gl.constexpr, SLOTS: gl.constexpr,
    PENDING: gl.constexpr, SCALE_OF: gl.constexpr, CHUNKED: gl.constexpr,
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
    c = Place(request + 0, lo + 0, hi + 0, end + 0)
    # + 0: unrolled, it would take longer, as what runs once waits for its instructions.
    for j in range(SLOTS + gl.minimum(start.split, 0)):
        c = load_half(
            c, page_of(plan, c), plan, kv_desc, rope_desc, scale_desc,
            ring, rope_ring, scale_ring, full, j, COL, ROPE_COL, SCALE_OF != "cache",
        )  # fmt: skip
    page = page_of(plan, c)
    while request <= plan.last:
        o_a = gl.zeros([64, N], gl.float32, accumulator(N))
        o_b = gl.zeros([64, N], gl.float32, accumulator(N))
        o_c = gl.zeros([64, N], gl.float32, accumulator(N))
        o_d = gl.zeros([64, N], gl.float32, accumulator(N))
        length = gl.load(seq_lens + request)
        slot = gl.load(requests + request * 4 + 0)
        splits = gl.load(requests + request * 4 + 1)
        for n in range(lo, hi):
            page = page_of(plan, c)
            mbarrier.wait(full_p.index(ip), pp)
            o_a, o_b, o_c, o_d = rescale(o_a, o_b, o_c, o_d, factors.index(ip), moved.index(ip), N)
            mbarrier.wait(full.index(i), phase)
            left = gl.minimum(length, hi * BLOCK) - n * BLOCK
            if left < BLOCK:
                clear_rows_past(ring.index(i), left)
            o_a, o_b, o_c, o_d = add_values(
                o_a, o_b, o_c, o_d, ring.index(i), p_ring, ip, ratios.index(i),
                GROUP, N, PENDING, SCALE_OF,
            )  # fmt: skip
            mbarrier.arrive(empty_p.index(ip), count=1)
            c = load_half(
                c, page, plan, kv_desc, rope_desc, scale_desc,
                ring, rope_ring, scale_ring, full, i, COL, ROPE_COL, SCALE_OF != "cache",
            )  # fmt: skip
            i, phase = ring_next(i, phase, SLOTS)
            ip, pp = ring_next(ip, pp, 2)

        after, after_lo, after_hi, after_end = next_segment(plan, request, hi, end)
        store_segment(
            (o_a, o_b, o_c, o_d), out, part_acc, inverse, full_out, empty_out, po, request, slot,
            split, splits, num_rows, COL, N,
        )  # fmt: skip
        po = po ^ 1
        request, lo, hi, end, split = step_on(request, split, after, after_lo, after_hi, after_end)
