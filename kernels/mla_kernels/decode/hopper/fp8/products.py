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
    scaled,
    value_units,
)
from mla_kernels.decode.hopper.fp8.query import rope_block, rope_of


@gluon.jit
def tile_scores(
    ring_a, ring_b, rope_ring, slot, query, query_rope, zero, scales, inverse,
    N: gl.constexpr, ADDENDS: gl.constexpr, AHEAD: gl.constexpr, GROUPED: gl.constexpr,
):  # fmt: skip
    """S^T [64, N], as ADDENDS: products of few heads take longer to follow one another in one sum
    than side by side. AHEAD of them are under way while operands are made. GROUPED: S^T times
    `inverse`, keys take their group's scale times that.

    zero    0, read from shared memory: what is computed with it, the query's descriptors, is not
            kept in registers from tile to tile"""
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, accumulator(N), 2)
    CHUNKS: gl.constexpr = 16 if GROUPED else 18
    s = gl.zeros([64, N], gl.float32, accumulator(N))
    s_b = s
    units = key_units(ring_a, ring_b, rope_ring, slot, 0, OPERAND)
    s_rope = s
    if GROUPED:
        rope_q = rope_of(query_rope)
        s_rope = warpgroup_mma(
            rope_ring.index(slot), rope_q.permute((1, 0)), s, use_acc=False, is_async=True
        )
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
        if GROUPED:
            ratio = (scales[c // 4] * inverse).to(gl.float16)
            ratio = gl.convert_layout(ratio, gl.SliceLayout(1, OPERAND), assert_trivial=True)
            keys = scaled(keys, ratio, 1)
        s = warpgroup_mma(keys, b_a, s, use_acc=c > 0, is_async=True)
        keys = halves(units, HIGH_TO_F16)
        if GROUPED:
            keys = scaled(keys, ratio, 1)
        if ADDENDS == 1:
            s = warpgroup_mma(keys, b_b, s, is_async=True)
            if GROUPED:
                s, s_rope = warpgroup_mma_wait(0 if c + 1 == CHUNKS else AHEAD, deps=(s, s_rope))
            else:
                s = warpgroup_mma_wait(0 if c + 1 == CHUNKS else AHEAD, deps=(s,))
        else:
            s_b = warpgroup_mma(keys, b_b, s_b, use_acc=c > 0, is_async=True)
            if GROUPED:
                s, s_b, s_rope = warpgroup_mma_wait(
                    0 if c + 1 == CHUNKS else AHEAD, deps=(s, s_b, s_rope)
                )
            else:
                s, s_b = warpgroup_mma_wait(0 if c + 1 == CHUNKS else AHEAD, deps=(s, s_b))
        units = later
    if ADDENDS == 2:
        s = s + s_b
    if GROUPED:
        s = gl.fma(s_rope, inverse[:, None] + gl.zeros_like(s), s)
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
    rope_q = rope_of(query_rope)
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
def value_operand(units, ratio, ASM: gl.constexpr, GROUPED: gl.constexpr):
    values = halves(units, ASM)
    if GROUPED:
        values = scaled(values, ratio, 0)
    return values


@gluon.jit
def weights_of(p, slot, c: gl.constexpr, GROUP: gl.constexpr, PLANES: gl.constexpr):
    """P^T of the tokens of a product, and of its group of columns where there is a plane for it."""
    plane = p.index(PLANES * slot + (0 if PLANES == 1 else GROUP + c % 2))
    return plane.slice(c // 2 * CHUNK, CHUNK, dim=0)


@gluon.jit
def ratio_of(
    units, ratios, slot, c: gl.constexpr, GROUP: gl.constexpr, OPERAND: gl.constexpr,
    SCALED: gl.constexpr,
):  # fmt: skip
    """The factors of those tokens, or anything where values take none."""
    if SCALED:
        part = ratios.index(slot).slice((GROUP + c % 2) * 64 + c // 2 * CHUNK, CHUNK)
        units = part.load(gl.SliceLayout(0, OPERAND))
    return units


@gluon.jit
def add_values(
    o_a, o_b, o_c, o_d, tile, p, ratios, slot,
    GROUP: gl.constexpr, N: gl.constexpr, PENDING: gl.constexpr, GROUPED: gl.constexpr,
    PLANES: gl.constexpr,
):  # fmt: skip
    """O^T [64 units, N] of the even and of the odd columns of one group, and of the next, plus
    V^T P^T of one tile. PENDING products are under way while an operand is made. GROUPED: values
    take their group's factor of a token, unless P^T, of several planes, has taken it."""
    SCALED: gl.constexpr = GROUPED and PLANES == 1
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, accumulator(N), 2)
    STEPS: gl.constexpr = 64 // CHUNK * 2
    units = value_units(tile.slice(0, 64, dim=1), 0, OPERAND)
    for c in gl.static_range(STEPS):
        weights = weights_of(p, slot, c, GROUP, PLANES)
        later = units
        if c + 1 < STEPS:
            later = value_units(tile.slice((c + 1) % 2 * 64, 64, dim=1), (c + 1) // 2, OPERAND)
        units = by_column(units)
        ratio = ratio_of(units, ratios, slot, c, GROUP, OPERAND, SCALED)
        values = value_operand(units, ratio, LOW_TO_F16, SCALED)
        if c % 2 == 0:
            o_a = warpgroup_mma(values, weights, o_a, is_async=True)
        else:
            o_c = warpgroup_mma(values, weights, o_c, is_async=True)
        o_a, o_b, o_c, o_d = warpgroup_mma_wait(PENDING, deps=(o_a, o_b, o_c, o_d))
        values = value_operand(units, ratio, HIGH_TO_F16, SCALED)
        if c % 2 == 0:
            o_b = warpgroup_mma(values, weights, o_b, is_async=True)
        else:
            o_d = warpgroup_mma(values, weights, o_d, is_async=True)
        o_a, o_b, o_c, o_d = warpgroup_mma_wait(
            0 if c + 1 == STEPS else PENDING, deps=(o_a, o_b, o_c, o_d)
        )
        units = later
    return o_a, o_b, o_c, o_d
