# SPDX-License-Identifier: Apache-2.0
"""Warpgroups 1 and 2: each owns 256 latent columns of O, adds P V to them, and issues the TMA loads
of its half of the cache (warpgroup 2 also those of the rope columns)."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from mla_kernels.decode.hopper.bf16.loads import load_next, stream_start
from mla_kernels.decode.hopper.layouts import (
    BLOCK,
    HALF,
    OUTPUT,
    OUTPUT_COL,
    OUTPUT_ROW,
    PARTIAL,
    PASS_64,
    PASS_64_ROW,
)
from mla_kernels.decode.hopper.rings import ring_next, ring_step
from mla_kernels.decode.hopper.segments import next_segment, start_segment, step_on
from mla_kernels.decode.hopper.softmax import rescale
from mla_kernels.triton_common.gluon_compat import (
    cta_barrier,
    reinterpret,
    tma_store,
    tma_store_wait,
)


@gluon.jit
def clear_rows_past(ring, slot, left):
    """Zero the rows of a tile at or past `left`: 0 * NaN would reach O."""
    row = gl.arange(0, BLOCK, PASS_64_ROW)
    for quarter in gl.static_range(4):
        part = ring.index(slot).slice(quarter * 64, 64, dim=1)
        part.store(gl.where((row < left)[:, None], part.load(PASS_64), 0.0))
    fence_async_shared()
    cta_barrier()


@gluon.jit
def store_tile(acc, tile, desc, row, COL: gl.constexpr):
    """Send a tile of results by way of the shared memory `tile`, which is free again afterwards."""
    tile.store(acc)
    fence_async_shared()
    cta_barrier()
    tma_store(desc, [row, COL], tile)
    tma_store_wait(0)
    cta_barrier()


@gluon.jit
def store_segment(
    acc, stage, out, part_acc, inverse, full_out, empty_out, phase, request, slot, split, splits,
    num_rows, COL: gl.constexpr, FULL: gl.constexpr,
):  # fmt: skip
    """Write a segment's half of O: the result, or split `split` of a request that is merged later.
    FULL: all 64 rows exist, and TMA writes them from the free tile `stage`; out and part_acc are
    descriptors then. Returns the next phase of full_out."""
    LATENT: gl.constexpr = 2 * HALF
    first_row = gl.program_id(0) * BLOCK
    mbarrier.wait(full_out, phase)
    inverse_row = inverse.load(OUTPUT_ROW)
    mbarrier.arrive(empty_out, count=1)
    acc = acc * inverse_row[:, None]
    if FULL:
        if splits == 1:
            store_tile(acc.to(gl.bfloat16), stage, out, request * num_rows + first_row, COL)
        else:
            half = reinterpret(stage, gl.float32, [BLOCK, HALF // 2], PARTIAL)
            left, right = gl.split(gl.permute(gl.reshape(acc, [BLOCK, 2, HALF // 2]), (0, 2, 1)))
            row = (slot + split) * num_rows + first_row
            store_tile(left, half, part_acc, row, COL)
            store_tile(right, half, part_acc, row, COL + HALF // 2)
    else:
        row = gl.arange(0, BLOCK, OUTPUT_ROW)
        col = gl.arange(0, HALF, OUTPUT_COL)
        row_ok = (first_row + row < num_rows)[:, None]
        at = (first_row + row)[:, None] * LATENT + (COL + col)[None, :]
        if splits == 1:
            whole = out + request.to(gl.int64) * num_rows * LATENT
            gl.store(whole + at, acc.to(gl.bfloat16), mask=row_ok)
        else:
            partial = part_acc + (slot + split).to(gl.int64) * num_rows * LATENT
            gl.store(partial + at, acc, mask=row_ok)
    return phase ^ 1


@gluon.jit
def add_tile(
    acc, cv, iv, ip, pp, n, length, plan, q_desc, q_rope_desc, kv_desc, kv_rope_desc,
    ring, full, ring_r, p_ring, full_p, empty_p, factors,
    COL: gl.constexpr, SLOTS: gl.constexpr, SLOTS_P: gl.constexpr,
    RESCALE: gl.constexpr, CLEAR: gl.constexpr,
):  # fmt: skip
    """O plus P V of tile n of a request, and the load that takes its slot. CLEAR: the tile may have
    rows past the request's length."""
    mbarrier.wait(full_p.index(ip), pp)
    if CLEAR:  # noqa: SIM102 (known to the compiler, the other is not)
        if (n + 1) * BLOCK > length:
            clear_rows_past(ring, iv, length - n * BLOCK)
    acc = rescale(acc, factors.index(ip), RESCALE)
    token = warpgroup_mma(p_ring.index(ip), ring.index(iv), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=(token,))
    mbarrier.arrive(empty_p.index(ip), count=1)
    cv = load_next(
        cv, plan, q_desc, q_rope_desc, kv_desc, kv_rope_desc, COL, ring, full, ring_r, iv,
    )  # fmt: skip
    iv = ring_step(iv, SLOTS)
    ip, pp = ring_next(ip, pp, SLOTS_P)
    return acc, cv, iv, ip, pp


@gluon.jit
def values_warpgroup(
    out, part_acc, q_desc, q_rope_desc, kv_desc, kv_rope_desc, table, table_stride,
    start, requests, seq_lens, ring, full, ring_r,
    p_ring, full_p, empty_p, full_q, factors, inverse, full_out, empty_out, num_rows,
    COL: gl.constexpr, SLOTS: gl.constexpr, SLOTS_P: gl.constexpr,
    RESCALE: gl.constexpr, CHUNKED: gl.constexpr, FULL: gl.constexpr, PEELED: gl.constexpr,
):  # fmt: skip
    iv = gl.to_tensor(0)
    ip = gl.to_tensor(0)
    pp = gl.to_tensor(0)
    po = gl.to_tensor(0)
    pq = gl.to_tensor(0)
    plan, request, lo, hi, end, split = start_segment(
        start, seq_lens, requests, table, table_stride, CHUNKED
    )
    cv = stream_start(request, lo, hi, end)
    # The last of the first loads goes where the first query tile was; later ones are taken before
    # an epilogue. Nor is a second query tile asked for, that of a segment behind one of one tile,
    # before the first was waited for: full_q would be two phases on if this warpgroup were late.
    first_wait = gl.where(hi - lo == 1, 2, SLOTS)
    for i0 in range(SLOTS + 1):
        if (i0 == first_wait) & (request <= plan.last):
            mbarrier.wait(full_q, pq)
        cv = load_next(
            cv, plan, q_desc, q_rope_desc, kv_desc, kv_rope_desc, COL, ring, full, ring_r,
            gl.where(i0 == SLOTS, 0, i0),
        )  # fmt: skip
    iv = iv + 1
    pq = pq ^ 1
    while request <= plan.last:
        length = gl.load(seq_lens + request)
        slot = gl.load(requests + request * 4 + 0)
        splits = gl.load(requests + request * 4 + 1)
        after, after_lo, after_hi, after_end = next_segment(plan, request, hi, end)
        acc = gl.zeros([BLOCK, HALF], gl.float32, OUTPUT)
        for n in range(lo, hi - 1 if PEELED else hi):
            acc, cv, iv, ip, pp = add_tile(
                acc, cv, iv, ip, pp, n, length, plan, q_desc, q_rope_desc, kv_desc, kv_rope_desc,
                ring, full, ring_r, p_ring, full_p, empty_p, factors,
                COL, SLOTS, SLOTS_P, RESCALE, not PEELED,
            )  # fmt: skip
        if PEELED:
            acc, cv, iv, ip, pp = add_tile(
                acc, cv, iv, ip, pp, hi - 1, length, plan, q_desc, q_rope_desc, kv_desc,
                kv_rope_desc, ring, full, ring_r, p_ring, full_p, empty_p, factors,
                COL, SLOTS, SLOTS_P, RESCALE, True,
            )  # fmt: skip
        # The next segment's query tile, once read, or else a tile of the past leaves its memory to
        # this epilogue.
        if after <= plan.last:
            mbarrier.wait(full_q, pq)
            pq = pq ^ 1
        po = store_segment(
            acc, ring.index(iv), out, part_acc, inverse, full_out, empty_out, po, request, slot,
            split, splits, num_rows, COL, FULL,
        )  # fmt: skip
        if after <= plan.last:
            cv = load_next(
                cv, plan, q_desc, q_rope_desc, kv_desc, kv_rope_desc, COL, ring, full, ring_r, iv,
            )  # fmt: skip
            iv = ring_step(iv, SLOTS)
        request, lo, hi, end, split = step_on(request, split, after, after_lo, after_hi, after_end)
