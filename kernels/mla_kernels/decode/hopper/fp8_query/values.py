# SPDX-License-Identifier: Apache-2.0
"""Warpgroups 1 and 2: each owns 256 latent columns of O^T, adds V^T P^T to them, and loads its half
of the cache.

fp8 wgmma adds with about 14 bits: a long sum in its accumulators would shrink. So a tile's product
starts from zero, and is added to O in fp32.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from mla_kernels.decode.hopper.fp8.loads import Place, load_half, page_of
from mla_kernels.decode.hopper.fp8.values import clear_rows_past, store_segment
from mla_kernels.decode.hopper.fp8_query.operands import (
    ACCUMULATOR,
    EVEN,
    ODD,
    STEP,
    columns,
    value_units,
)
from mla_kernels.decode.hopper.fp8_query.softmax import EACH, ONE_BITS
from mla_kernels.decode.hopper.layouts import BLOCK
from mla_kernels.decode.hopper.rings import ring_next
from mla_kernels.decode.hopper.segments import next_segment, start_segment, step_on


@gluon.jit
def rescale(o_a, o_b, o_c, o_d, factors, lows):
    """O at the new references, if one has moved."""
    if gl.min(lows.load(EACH), 0) < ONE_BITS:
        factor = factors.slice(0, BLOCK)  # of a row's first lane
        factor = factor.load(gl.SliceLayout(0, ACCUMULATOR))[None, :]
        o_a = o_a * factor
        o_b = o_b * factor
        o_c = o_c * factor
        o_d = o_d * factor
    return o_a, o_b, o_c, o_d


@gluon.jit
def product(acc, never, units, weights, ASM: gl.constexpr):
    """V^T P^T of the even or the odd columns of 64 units, asynchronous, in the registers of acc.
    never: False, but the compiler cannot know, which would take other registers and run short."""
    for c in gl.static_range(2):
        p = weights.slice(c * STEP, STEP, dim=0)
        if c == 0:
            acc = warpgroup_mma(columns(units[c], ASM), p, acc, use_acc=never, is_async=True)
        else:
            acc = warpgroup_mma(columns(units[c], ASM), p, acc, is_async=True)
    return acc


@gluon.jit
def added(o, x):
    """o + x, here and now: the compiler would put all of a tile's additions behind its last
    product, and keep all four products for them."""
    return gl.inline_asm_elementwise(
        "add.f32 $0, $1, $2;", "=f,f,f", [o, x], dtype=gl.float32, is_pure=False, pack=1
    )


@gluon.jit
def all_units(tile, g: gl.constexpr):
    half = tile.slice(g * 64, 64, dim=1)
    return value_units(half, 0), value_units(half, 1)


@gluon.jit
def add_values(
    o_a, o_b, o_c, o_d, x, never, units, c, page, i, p, factors, lows, loads, COL: gl.constexpr
):
    """O^T of the even and of the odd columns of 64 units, and of the next, plus V^T P^T of a tile,
    whose first units have been read. Its memory is refilled as soon as the others have."""
    weights = p.permute((1, 0))
    x = product(x, never, units, weights, EVEN)
    o_a, o_b, o_c, o_d = rescale(o_a, o_b, o_c, o_d, factors, lows)
    x = warpgroup_mma_wait(0, deps=(x,))
    o_a = added(o_a, x)
    x = product(x, never, units, weights, ODD)
    plan, kv_desc, rope_desc, ring, rope_ring, full = loads
    units = all_units(ring.index(i), 1)
    x = warpgroup_mma_wait(0, deps=(x,))
    o_b = added(o_b, x)
    x = product(x, never, units, weights, EVEN)
    x = warpgroup_mma_wait(0, deps=(x,))
    o_c = added(o_c, x)
    x = product(x, never, units, weights, ODD)
    c = load_half(
        c, page, plan, kv_desc, rope_desc, kv_desc, ring, rope_ring, rope_ring, full, i,
        COL, 256, False,
    )  # fmt: skip
    x = warpgroup_mma_wait(0, deps=(x,))
    o_d = added(o_d, x)
    return o_a, o_b, o_c, o_d, x, c


@gluon.jit
def values_warpgroup(
    out, part_acc, kv_desc, rope_desc, table, table_stride, start, requests, seq_lens,
    ring, rope_ring, full, p_ring, factors, lows, full_p, empty_p,
    inverse, full_out, empty_out, num_rows,
    COL: gl.constexpr, SLOTS: gl.constexpr, SLOTS_P: gl.constexpr,
    CHUNKED: gl.constexpr,
):  # fmt: skip
    i = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    ip = gl.to_tensor(0)
    pp = gl.to_tensor(0)
    po = gl.to_tensor(0)
    plan, request, lo, hi, end, split = start_segment(
        start, seq_lens, requests, table, table_stride, CHUNKED
    )
    c = Place(request + 0, lo + 0, hi + 0, end + 0)
    loads = plan, kv_desc, rope_desc, ring, rope_ring, full
    # + 0 that the compiler does not know: unrolled, it takes longer, as its code must be fetched.
    for j in range(SLOTS + gl.minimum(start.split, 0)):
        c = load_half(
            c, page_of(plan, c), plan, kv_desc, rope_desc, kv_desc,
            ring, rope_ring, rope_ring, full, j, COL, 256, False,
        )  # fmt: skip
    x = gl.zeros([64, BLOCK], gl.float32, ACCUMULATOR)
    never = request < 0
    while request <= plan.last:
        o_a = gl.zeros([64, BLOCK], gl.float32, ACCUMULATOR)
        o_b = gl.zeros([64, BLOCK], gl.float32, ACCUMULATOR)
        o_c = gl.zeros([64, BLOCK], gl.float32, ACCUMULATOR)
        o_d = gl.zeros([64, BLOCK], gl.float32, ACCUMULATOR)
        length = gl.load(seq_lens + request)
        slot = gl.load(requests + request * 4 + 0)
        splits = gl.load(requests + request * 4 + 1)
        after, after_lo, after_hi, after_end = next_segment(plan, request, hi, end)
        # Two turns if the last tile has rows past the request's length: they are cleared between,
        # so that the loop over tiles has no branch for them, and its code is there once.
        tail = (hi * BLOCK > length).to(gl.int32)
        for turn in range(1 + tail):
            if turn > 0:
                mbarrier.wait(full.index(i), phase)
                clear_rows_past(ring.index(i), length - (hi - 1) * BLOCK)
            for _n in range(gl.where(turn > 0, 1, hi - lo - tail)):
                page = page_of(plan, c)
                mbarrier.wait(full.index(i), phase)
                units = all_units(ring.index(i), 0)
                mbarrier.wait(full_p.index(ip), pp)
                o_a, o_b, o_c, o_d, x, c = add_values(
                    o_a, o_b, o_c, o_d, x, never, units, c, page, i,
                    p_ring.index(ip), factors.index(ip), lows.index(ip), loads, COL,
                )  # fmt: skip
                mbarrier.arrive(empty_p.index(ip), count=1)
                i, phase = ring_next(i, phase, SLOTS)
                ip, pp = ring_next(ip, pp, SLOTS_P)

        store_segment(
            (o_a, o_b, o_c, o_d), out, part_acc, inverse, full_out, empty_out, po, request, slot,
            split, splits, num_rows, COL, BLOCK,
        )  # fmt: skip
        po = po ^ 1
        request, lo, hi, end, split = step_on(request, split, after, after_lo, after_hi, after_end)
