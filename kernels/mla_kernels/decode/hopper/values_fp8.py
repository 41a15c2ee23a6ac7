# SPDX-License-Identifier: Apache-2.0
"""Warpgroups 1 and 2 with an fp8 cache: as values.py, but the cache lands as codes, and each
warpgroup turns its half of tile n + 1 into bf16 before it waits for P(n).

Two bf16 tiles a ring are enough: tile n + 1 takes the place of n - 1, whose PV is done, and the
loads run ahead in the rings of codes. Query tiles go straight to the bf16 rings, in their turn.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from mla_kernels.decode.hopper.convert import Codes, code_stream, convert_next, load_codes
from mla_kernels.decode.hopper.layouts import BLOCK, HALF, OUTPUT, ROPE
from mla_kernels.decode.hopper.softmax import rescale
from mla_kernels.decode.hopper.stream import (
    load_next,
    load_query,
    next_segment,
    ring_next,
    ring_step,
    start_segment,
    stream_start,
)
from mla_kernels.decode.hopper.values import clear_rows_past, store_segment
from mla_kernels.layouts import Fp8DsMlaLayout

# The rope part of an fp8_ds_mla row, in bf16 columns.
ROPE_COL = gl.constexpr(Fp8DsMlaLayout().rope_offset // 2)


@gluon.jit
def place_query(q_desc, request, tiles, full, slot, COL: gl.constexpr):
    mbarrier.expect(full.index(slot), BLOCK * tiles.shape[2] * 2)
    load_query(q_desc, request, COL, full.index(slot), tiles.index(slot), True)


@gluon.jit
def values_fp8_warpgroup(
    out, part_acc, q_desc, q_rope_desc, kv_desc, kv_rope_desc, scale_desc, kv_scale,
    table, table_stride, start, requests, seq_lens,
    tiles, full, codes, landed, scales, rope_tiles, full_r, rope_codes, landed_r,
    p_ring, full_p, empty_p, full_q, factors, inverse, full_out, empty_out, num_rows,
    COL: gl.constexpr, SLOTS: gl.constexpr, SLOTS_R: gl.constexpr, SLOTS_P: gl.constexpr,
    FORMAT: gl.constexpr, LOAD_SCALE: gl.constexpr, RESCALE: gl.constexpr,
    CHUNKED: gl.constexpr,
):  # fmt: skip
    LATENT: gl.constexpr = 2 * HALF
    GROUPED: gl.constexpr = FORMAT == "fp8_ds_mla"
    HAS_ROPE: gl.constexpr = COL > 0
    scale = gl.to_tensor(1.0)
    if FORMAT == "fp8":
        if LOAD_SCALE:
            scale = gl.load(kv_scale)
        else:
            scale = kv_scale
    latent = Codes(
        codes, landed, scales, tiles, full, kv_desc, scale_desc, scale, COL, HALF, SLOTS, GROUPED
    )
    if not GROUPED:
        rope = Codes(
            rope_codes, landed_r, scales, rope_tiles, full_r, kv_rope_desc, scale_desc, scale,
            LATENT, ROPE, SLOTS, False,
        )  # fmt: skip
    iv = gl.to_tensor(1)
    ic = gl.to_tensor(0)
    pc = gl.to_tensor(0)
    ir = gl.to_tensor(0)
    ip = gl.to_tensor(0)
    pp = gl.to_tensor(0)
    po = gl.to_tensor(0)
    pq = gl.to_tensor(0)
    irc = gl.to_tensor(0)
    prc = gl.to_tensor(0)
    plan, request, lo, hi, end, split = start_segment(
        start, seq_lens, requests, table, table_stride, CHUNKED
    )
    if request <= plan.last:
        place_query(q_desc, request, tiles, full, 0, COL)
    cv = code_stream(plan, request, lo, hi, end)
    for i0 in gl.static_range(SLOTS):
        cv = load_codes(cv, plan, latent, i0)
    if HAS_ROPE:
        if GROUPED:  # bf16: a stream of query and cache tiles, as without fp8
            cr = stream_start(request, lo, hi, end)
            for i1 in gl.static_range(SLOTS_R):
                cr = load_next(
                    cr, plan, q_rope_desc, kv_rope_desc, 0, ROPE_COL, ROPE,
                    rope_tiles, full_r, i1,
                )  # fmt: skip
        else:
            if request <= plan.last:
                place_query(q_rope_desc, request, rope_tiles, full_r, 0, 0)
            cr = code_stream(plan, request, lo, hi, end)
            for i2 in gl.static_range(SLOTS):
                cr = load_codes(cr, plan, rope, i2)
    if request <= plan.last:
        cv, ic, pc = convert_next(cv, plan, latent, ic, pc, iv)
        if HAS_ROPE and not GROUPED:
            cr, irc, prc = convert_next(cr, plan, rope, irc, prc, iv)
        mbarrier.wait(full_q, pq)
        pq = pq ^ 1
        if HAS_ROPE and GROUPED:
            cr = load_next(
                cr, plan, q_rope_desc, kv_rope_desc, 0, ROPE_COL, ROPE,
                rope_tiles, full_r, ir,
            )  # fmt: skip
            ir = ring_step(ir, SLOTS_R)
    while request <= plan.last:
        length = gl.load(seq_lens + request)
        slot = gl.load(requests + request * 4 + 0)
        splits = gl.load(requests + request * 4 + 1)
        after, after_lo, after_hi, after_end = next_segment(plan, request, hi, end)
        acc = gl.zeros([BLOCK, HALF], gl.float32, OUTPUT)
        for _n in range(lo, hi - 1):
            cv, ic, pc = convert_next(cv, plan, latent, ic, pc, iv ^ 1)
            if HAS_ROPE and not GROUPED:
                cr, irc, prc = convert_next(cr, plan, rope, irc, prc, iv ^ 1)
            mbarrier.wait(full_p.index(ip), pp)
            if HAS_ROPE and GROUPED:  # P(n) is there, so QK(n) is done and its rope tile is free
                cr = load_next(
                    cr, plan, q_rope_desc, kv_rope_desc, 0, ROPE_COL, ROPE,
                    rope_tiles, full_r, ir,
                )  # fmt: skip
                ir = ring_step(ir, SLOTS_R)
            acc = rescale(acc, factors.index(ip), RESCALE)
            token = warpgroup_mma(p_ring.index(ip), tiles.index(iv), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=(token,))
            mbarrier.arrive(empty_p.index(ip), count=1)
            iv = iv ^ 1
            ip, pp = ring_next(ip, pp, SLOTS_P)

        if after <= plan.last:  # the next query tile takes the place of tile hi - 2
            place_query(q_desc, after, tiles, full, iv ^ 1, COL)
            if HAS_ROPE and not GROUPED:
                place_query(q_rope_desc, after, rope_tiles, full_r, iv ^ 1, 0)
        mbarrier.wait(full_p.index(ip), pp)
        if HAS_ROPE and GROUPED:
            cr = load_next(
                cr, plan, q_rope_desc, kv_rope_desc, 0, ROPE_COL, ROPE,
                rope_tiles, full_r, ir,
            )  # fmt: skip
            ir = ring_step(ir, SLOTS_R)
        if hi * BLOCK > length:
            clear_rows_past(tiles, iv, length - (hi - 1) * BLOCK)
        acc = rescale(acc, factors.index(ip), RESCALE)
        token = warpgroup_mma(p_ring.index(ip), tiles.index(iv), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=(token,))
        mbarrier.arrive(empty_p.index(ip), count=1)
        ip, pp = ring_next(ip, pp, SLOTS_P)
        if after <= plan.last:  # warpgroup 0 goes on while this one stores
            cv, ic, pc = convert_next(cv, plan, latent, ic, pc, iv)
            if HAS_ROPE and not GROUPED:
                cr, irc, prc = convert_next(cr, plan, rope, irc, prc, iv)
            mbarrier.wait(full_q, pq)
            pq = pq ^ 1
            if HAS_ROPE and GROUPED:
                cr = load_next(
                    cr, plan, q_rope_desc, kv_rope_desc, 0, ROPE_COL, ROPE,
                    rope_tiles, full_r, ir,
                )  # fmt: skip
                ir = ring_step(ir, SLOTS_R)
        po = store_segment(
            acc, tiles.index(iv), out, part_acc, inverse, full_out, empty_out, po, request, slot,
            split, splits, num_rows, COL, False,
        )  # fmt: skip
        split = gl.where(after == request, split + 1, 0)
        request = after + 0
        lo = after_lo + 0
        hi = after_hi + 0
        end = after_end + 0
