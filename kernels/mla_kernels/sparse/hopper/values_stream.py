# SPDX-License-Identifier: Apache-2.0
"""Warpgroups 1 and 2 of the stream (stream.py): those of values_bf16.py, token after token."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from mla_kernels.decode.hopper.layouts import BLOCK, HALF, OUTPUT, OUTPUT_ROW
from mla_kernels.decode.hopper.rings import ring_next, ring_step
from mla_kernels.sparse.hopper.scales import load_scalar
from mla_kernels.sparse.hopper.stream import (
    Rings,
    Tokens,
    enter_token,
    fill,
    load_tile_slots,
    look_ahead,
)
from mla_kernels.sparse.hopper.values import LATENT, add_values, store_part, store_whole
from mla_kernels.sparse.hopper.walk import part_of, program_walk, row_of


@gluon.jit
def store_token(
    acc, out, inverse, full_out, empty_out, phase, token, num_heads, COL: gl.constexpr
):  # fmt: skip
    """Write one half of a token's O."""
    mbarrier.wait(full_out, phase)
    inverse_row = inverse.load(OUTPUT_ROW)
    mbarrier.arrive(empty_out, count=1)
    of_token = out + row_of(token, num_heads) * LATENT
    store_whole(acc, inverse_row, of_token, gl.program_id(1) * BLOCK, num_heads, COL)


@gluon.jit
def values_stream_warpgroup(
    q_desc, q_rope_desc, out, part_acc, kv, slots, slots_stride, lengths, K, span, splits,
    num_tokens, num_slots, page_stride, num_heads, ring, full, ring_r, offsets, full_v, counts,
    found, num_tiles, full_q, p_ring, full_p, empty_p, factors, inverse, full_out, empty_out,
    COL: gl.constexpr, SLOTS: gl.constexpr, SLOTS_P: gl.constexpr,
    PAGE: gl.constexpr, ROW: gl.constexpr, HAS_LENGTHS: gl.constexpr, SHARES: gl.constexpr,
):  # fmt: skip
    walk = program_walk(num_tokens, K, span, SHARES)
    tokens = Tokens(
        slots, slots_stride, lengths, K, walk.step, walk.end, walk.stop, num_slots, page_stride,
        PAGE, ROW, HAS_LENGTHS, SHARES,
    )  # fmt: skip
    rings = Rings(ring, full, ring_r, offsets, full_v, counts, found, COL)
    iv = gl.to_tensor(0)
    ip = gl.to_tensor(0)
    pp = gl.to_tensor(0)
    phase = gl.to_tensor(0)  # of full_q and full_out; which place of num_tiles
    # The first query and tile; what follows waits until the query is read, the last for its slot.
    c = enter_token(tokens, walk.first, walk.start)
    slot, last = look_ahead(tokens, c)
    first = load_tile_slots(tokens, c, walk.start)
    for i in range(SLOTS + 1):
        if i == 2:
            mbarrier.wait(full_q, phase)
        c = fill(
            tokens, c, slot, last, q_desc, q_rope_desc, kv, rings, gl.where(i == SLOTS, 0, i)
        )  # fmt: skip
        slot = first
        if i > 0:
            slot, last = look_ahead(tokens, c)
    iv = iv + 1
    for token in range(walk.first, walk.end, walk.step):
        acc = gl.zeros([BLOCK, HALF], gl.float32, OUTPUT)
        # Read here and not carried from where full_q is waited for: Triton 3.6 takes a number that
        # only an `if` of the loop sets (triton-loop-aware-cse) for what it was before the loop.
        for _ in range(load_scalar(num_tiles.index(phase))):
            slot, last = look_ahead(tokens, c)
            mbarrier.wait(full_p.index(ip), pp)
            acc = add_values(acc, p_ring, ring.index(iv), factors, empty_p, ip)
            c = fill(tokens, c, slot, last, q_desc, q_rope_desc, kv, rings, iv)
            iv = ring_step(iv, SLOTS)
            ip, pp = ring_next(ip, pp, SLOTS_P)
        # The next item takes the place of the next token's query, before this token is stored.
        if token + walk.step < walk.end:
            slot, last = look_ahead(tokens, c)
            mbarrier.wait(full_q, phase ^ 1)
            c = fill(tokens, c, slot, last, q_desc, q_rope_desc, kv, rings, iv)
            iv = ring_step(iv, SLOTS)
        if SHARES:
            part = part_acc + row_of(part_of(walk, token, splits), num_heads) * LATENT
            store_part(acc, part, gl.program_id(1) * BLOCK, num_heads, COL)
        else:
            store_token(acc, out, inverse, full_out, empty_out, phase, token, num_heads, COL)
        phase = phase ^ 1
    async_copy.commit_group()  # a wait is for groups, and no copy before was in one
    async_copy.wait_group(0)
