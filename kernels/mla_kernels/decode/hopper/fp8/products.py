# SPDX-License-Identifier: Apache-2.0
"""Both products of a step, asynchronous: K Q^T and V^T P^T, with A operands from codes."""

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
    halves,
    key_units,
    scaled,
    value_units,
)


@gluon.jit
def step_scores(
    ring_a, ring_b, rope_ring, slots, query, rope_a, rope_b,
    N: gl.constexpr, STEP: gl.constexpr, ADDENDS: gl.constexpr, AHEAD: gl.constexpr,
):  # fmt: skip
    """S^T [64, N] of STEP tiles, each as ADDENDS: products of few heads take longer to follow one
    another in one sum than side by side. AHEAD of them are under way while operands are made."""
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, accumulator(N), 2)
    zero = gl.zeros([64, N], gl.float32, accumulator(N))
    sums = ()
    units = ()
    for t in gl.static_range(STEP):
        for _a in gl.static_range(ADDENDS):
            sums = sums + (zero,)  # type: ignore  # noqa: RUF005
        units = units + (key_units(ring_a, ring_b, rope_ring, slots[t], 0, OPERAND),)  # type: ignore  # noqa: RUF005
    for c in gl.static_range(18):
        if c < 16:
            b_a = query.index(c // 4 * 2).slice(c % 4 * 16, 16, dim=1).permute((1, 0))
            b_b = query.index(c // 4 * 2 + 1).slice(c % 4 * 16, 16, dim=1).permute((1, 0))
        else:
            b_a = rope_a.slice(c * 16 - 256, 16, dim=1).permute((1, 0))
            b_b = rope_b.slice(c * 16 - 256, 16, dim=1).permute((1, 0))
        later = ()
        added = ()
        for t in gl.static_range(STEP):
            if c < 17:
                later = later + (key_units(ring_a, ring_b, rope_ring, slots[t], c + 1, OPERAND),)  # type: ignore  # noqa: RUF005
            keys = halves(units[t], LOW_TO_F16)
            s = warpgroup_mma(keys, b_a, sums[t * ADDENDS], use_acc=c > 0, is_async=True)
            keys = halves(units[t], HIGH_TO_F16)
            if ADDENDS == 1:
                added = added + (warpgroup_mma(keys, b_b, s, is_async=True),)  # type: ignore  # noqa: RUF005
            else:
                s_b = warpgroup_mma(keys, b_b, sums[2 * t + 1], use_acc=c > 0, is_async=True)
                added = added + (s, s_b)  # type: ignore  # noqa: RUF005
        if STEP * ADDENDS == 1:
            sums = (warpgroup_mma_wait(0 if c == 17 else AHEAD, deps=added),)  # type: ignore
        else:
            sums = warpgroup_mma_wait(0 if c == 17 else AHEAD, deps=added)
        units = later
    return sums


@gluon.jit
def group_scores(units, q_a, q_b, N: gl.constexpr, AHEAD: gl.constexpr):
    """Scores of one group of 128 columns without its scale, not waited for."""
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, accumulator(N), 2)
    s = gl.zeros([64, N], gl.float32, accumulator(N))
    units = units.load(OPERAND)
    keys = halves(units, LOW_TO_F16)
    s = warpgroup_mma(keys, q_a.permute((1, 0)), s, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(AHEAD, deps=(s,))
    keys = halves(units, HIGH_TO_F16)
    return warpgroup_mma(keys, q_b.permute((1, 0)), s, is_async=True)


@gluon.jit
def grouped_tile_scores(
    ring_a, ring_b, rope_ring, slot, query, rope_q, scales,
    N: gl.constexpr,
):  # fmt: skip
    """S^T [64, N] of one tile of an fp8_ds_mla cache: a group is added while the next is
    multiplied."""
    s = gl.zeros([64, N], gl.float32, accumulator(N))
    s = warpgroup_mma(
        rope_ring.index(slot), rope_q.permute((1, 0)), s, use_acc=False, is_async=True
    )
    last = group_scores(
        ring_a.index(slot).slice(0, 64, dim=1),
        query.index(0), query.index(1), N, 2,
    )  # fmt: skip
    for c in gl.static_range(1, 4):
        ring = ring_a if c < 2 else ring_b
        part = group_scores(
            ring.index(slot).slice(c % 2 * 64, 64, dim=1),
            query.index(2 * c), query.index(2 * c + 1), N, 2,
        )  # fmt: skip
        s, last, part = warpgroup_mma_wait(2, deps=(s, last, part))
        s = gl.fma(last, scales[c - 1][:, None] + gl.zeros_like(last), s)
        last = part
    last = warpgroup_mma_wait(0, deps=(last,))
    return gl.fma(last, scales[3][:, None] + gl.zeros_like(last), s)


@gluon.jit
def add_values(
    o_a, o_b, o_c, o_d, tile, p, ratios, slot,
    GROUP: gl.constexpr, N: gl.constexpr, PENDING: gl.constexpr, GROUPED: gl.constexpr,
):  # fmt: skip
    """O^T [64 units, N] of the even and of the odd columns of one group, and of the next, plus
    V^T P^T of one tile. GROUPED: values take their group's factor of a token."""
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, accumulator(N), 2)
    for c in gl.static_range(64 // CHUNK):
        weights = p.slice(c * CHUNK, CHUNK, dim=0)
        units = value_units(tile.slice(0, 64, dim=1), c, OPERAND)
        a = halves(units, LOW_TO_F16)
        b = halves(units, HIGH_TO_F16)
        if GROUPED:
            part = ratios.index(slot).slice(GROUP * 64 + c * CHUNK, CHUNK)
            ratio = part.load(gl.SliceLayout(0, OPERAND))
            a = scaled(a, ratio)
            b = scaled(b, ratio)
        o_a = warpgroup_mma(a, weights, o_a, is_async=True)
        o_b = warpgroup_mma(b, weights, o_b, is_async=True)
        if PENDING < 4:
            o_a, o_b = warpgroup_mma_wait(PENDING, deps=(o_a, o_b))
        units = value_units(tile.slice(64, 64, dim=1), c, OPERAND)
        a = halves(units, LOW_TO_F16)
        b = halves(units, HIGH_TO_F16)
        if GROUPED:
            part = ratios.index(slot).slice(GROUP * 64 + 64 + c * CHUNK, CHUNK)
            ratio = part.load(gl.SliceLayout(0, OPERAND))
            a = scaled(a, ratio)
            b = scaled(b, ratio)
        o_c = warpgroup_mma(a, weights, o_c, is_async=True)
        o_d = warpgroup_mma(b, weights, o_d, is_async=True)
        o_a, o_b, o_c, o_d = warpgroup_mma_wait(
            0 if (c + 1) * CHUNK == 64 else PENDING, deps=(o_a, o_b, o_c, o_d)
        )
    return o_a, o_b, o_c, o_d
