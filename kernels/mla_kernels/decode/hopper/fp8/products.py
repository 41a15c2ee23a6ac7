# SPDX-License-Identifier: Apache-2.0
"""Both products of a tile, asynchronous: K Q^T and V^T P^T, with A operands from codes."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    warpgroup_mma,
    warpgroup_mma_wait,
)

from mla_kernels.decode.hopper.fp8.operands import (
    CHUNK,
    HIGH_TO_F16,
    LOW_TO_F16,
    accumulator,
    by_column,
    halves,
    key_units,
    value_units,
)
from mla_kernels.decode.hopper.fp8.query import rope_block, rope_of
from mla_kernels.decode.hopper.fp8.tile_scales import ratios_of, scaled


@gluon.jit
def tile_scores(
    ring_a, ring_b, rope_ring, slot, query, query_rope, zero, ratios,
    N: gl.constexpr, ADDENDS: gl.constexpr, AHEAD: gl.constexpr, SCALED: gl.constexpr,
):  # fmt: skip
    """S^T [64, N], as ADDENDS: products of few heads take longer to follow one another in one sum
    than side by side. AHEAD of them are under way while operands are made. SCALED: keys take their
    group's ratio of a token, and the rope columns are bf16.

    zero    0, read from shared memory: what is computed with it, the query's descriptors, is not
            kept in registers from tile to tile"""
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, accumulator(N), 2)
    CHUNKS: gl.constexpr = 16 if SCALED else 18
    LAST: gl.constexpr = CHUNKS if SCALED else CHUNKS - 1
    s = gl.zeros([64, N], gl.float32, accumulator(N))
    s_b = s
    units = key_units(ring_a, ring_b, rope_ring, slot, 0, OPERAND)
    for c in gl.static_range(CHUNKS):
        if c < 16:
            block = query.index(zero + c // 2)
        else:
            block = rope_block(query_rope, zero)
        b_a = block.slice(c % 2 * 32, 16, dim=1).permute((1, 0))
        b_b = block.slice(c % 2 * 32 + 16, 16, dim=1).permute((1, 0))
        later = units
        if c + 1 < CHUNKS:
            later = key_units(ring_a, ring_b, rope_ring, slot, c + 1, OPERAND)
        keys = halves(units, LOW_TO_F16)
        if SCALED:
            if c % 4 == 0:
                ratio = ratios_of(ratios, c // 4, 0, 64, gl.SliceLayout(1, OPERAND))
            keys = scaled(keys, ratio, 1)
        s = warpgroup_mma(keys, b_a, s, use_acc=c > 0, is_async=True)
        keys = halves(units, HIGH_TO_F16)
        if SCALED:
            keys = scaled(keys, ratio, 1)
        if ADDENDS == 1:
            s = warpgroup_mma(keys, b_b, s, is_async=True)
            s = warpgroup_mma_wait(0 if c == LAST else AHEAD, deps=(s,))
        else:
            s_b = warpgroup_mma(keys, b_b, s_b, use_acc=c > 0, is_async=True)
            s, s_b = warpgroup_mma_wait(0 if c == LAST else AHEAD, deps=(s, s_b))
        units = later
    if SCALED:
        rope_q = rope_of(query_rope, zero).permute((1, 0))
        s = warpgroup_mma(rope_ring.index(slot), rope_q, s, is_async=True)
        s, s_b = warpgroup_mma_wait(0, deps=(s, s_b))
    if ADDENDS == 2:
        s = s + s_b
    return s


@gluon.jit
def group_scores(
    ring_a, ring_b, rope_ring, slot, query, query_rope, zero, N: gl.constexpr, AHEAD: gl.constexpr
):  # fmt: skip
    """S^T [64, N] of each group of 128 columns, without its scales, and of the rope columns. Groups
    of both halves in turn, as products of few heads take longer to follow one another in one sum.

    zero    as in tile_scores"""
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, accumulator(N), 2)
    none = gl.zeros([64, N], gl.float32, accumulator(N))
    rope_q = rope_of(query_rope, zero)
    rope = warpgroup_mma(
        rope_ring.index(slot), rope_q.permute((1, 0)), none, use_acc=False, is_async=True
    )
    s_0 = none
    s_1 = none
    s_2 = none
    s_3 = none
    a = key_units(ring_a, ring_b, rope_ring, slot, 0, OPERAND)
    b = key_units(ring_a, ring_b, rope_ring, slot, 8, OPERAND)
    for c in gl.static_range(8):
        q_a = query.index(zero + c // 2)
        q_b = query.index(zero + c // 2 + 4)
        next_a = a
        next_b = b
        if c + 1 < 8:
            next_a = key_units(ring_a, ring_b, rope_ring, slot, c + 1, OPERAND)
            next_b = key_units(ring_a, ring_b, rope_ring, slot, c + 9, OPERAND)
        for high in gl.static_range(2):
            keys_a = halves(a, HIGH_TO_F16 if high else LOW_TO_F16)
            keys_b = halves(b, HIGH_TO_F16 if high else LOW_TO_F16)
            part_a = q_a.slice(c % 2 * 32 + high * 16, 16, dim=1).permute((1, 0))
            part_b = q_b.slice(c % 2 * 32 + high * 16, 16, dim=1).permute((1, 0))
            if c < 4:
                s_0 = warpgroup_mma(keys_a, part_a, s_0, use_acc=c + high > 0, is_async=True)
                s_2 = warpgroup_mma(keys_b, part_b, s_2, use_acc=c + high > 0, is_async=True)
            else:
                s_1 = warpgroup_mma(keys_a, part_a, s_1, use_acc=c + high > 4, is_async=True)
                s_3 = warpgroup_mma(keys_b, part_b, s_3, use_acc=c + high > 4, is_async=True)
            s_0, s_1, s_2, s_3, rope = warpgroup_mma_wait(
                0 if c + high == 8 else AHEAD, deps=(s_0, s_1, s_2, s_3, rope)
            )
        a = next_a
        b = next_b
    return s_0, s_1, s_2, s_3, rope


@gluon.jit
def value_operand(units, ratio, ASM: gl.constexpr, SCALED: gl.constexpr):
    values = halves(units, ASM)
    if SCALED:
        values = scaled(values, ratio, 0)
    return values


@gluon.jit
def weights_of(p_ring, slot, group: gl.constexpr, tokens: gl.constexpr, SCALE_OF: gl.constexpr):
    """P^T of 16 tokens, of SCALE_OF "token" for one group's columns."""
    if SCALE_OF == "token":
        plane = p_ring.index(4 * slot + group)
    else:
        plane = p_ring.index(slot)
    return plane.slice(tokens * CHUNK, CHUNK, dim=0)


@gluon.jit
def add_values(
    o_a, o_b, o_c, o_d, tile, p_ring, slot, ratios,
    GROUP: gl.constexpr, N: gl.constexpr, PENDING: gl.constexpr, SCALE_OF: gl.constexpr,
):  # fmt: skip
    """O^T [64 units, N] of the even and of the odd columns of one group, and of the next, plus
    V^T P^T of one tile. PENDING products are under way while operands are made. Of SCALE_OF "tile"
    values take their group's ratio of a token, of "token" P^T is there once a group."""
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, accumulator(N), 2)
    STEPS: gl.constexpr = 64 // CHUNK * 2
    SCALED: gl.constexpr = SCALE_OF == "tile"
    units = value_units(tile.slice(0, 64, dim=1), 0, OPERAND)
    ratio = units
    for c in gl.static_range(STEPS):
        weights = weights_of(p_ring, slot, GROUP + c % 2, c // 2, SCALE_OF)
        later = units
        if c + 1 < STEPS:
            later = value_units(tile.slice((c + 1) % 2 * 64, 64, dim=1), (c + 1) // 2, OPERAND)
        units = by_column(units)
        if SCALED:
            ratio = ratios_of(
                ratios, GROUP + c % 2, c // 2 * CHUNK, CHUNK, gl.SliceLayout(0, OPERAND)
            )
        even = value_operand(units, ratio, LOW_TO_F16, SCALED)
        if N < 64:  # with 64 rows there are no registers for both
            odd = value_operand(units, ratio, HIGH_TO_F16, SCALED)
        if c % 2 == 0:
            o_a = warpgroup_mma(even, weights, o_a, is_async=True)
        else:
            o_c = warpgroup_mma(even, weights, o_c, is_async=True)
        if N == 64:
            o_a, o_b, o_c, o_d = warpgroup_mma_wait(PENDING, deps=(o_a, o_b, o_c, o_d))
            odd = value_operand(units, ratio, HIGH_TO_F16, SCALED)
        if c % 2 == 0:
            o_b = warpgroup_mma(odd, weights, o_b, is_async=True)
        else:
            o_d = warpgroup_mma(odd, weights, o_d, is_async=True)
        o_a, o_b, o_c, o_d = warpgroup_mma_wait(
            0 if c + 1 == STEPS else PENDING, deps=(o_a, o_b, o_c, o_d)
        )
        units = later
    return o_a, o_b, o_c, o_d
