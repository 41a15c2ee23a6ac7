# SPDX-License-Identifier: Apache-2.0
"""Layouts of the fp8 Hopper kernel, and its A operands: codes to fp16 in registers.

A tile is read as 16-bit units, two neighbouring codes each (few_rows/operands.py).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

CHUNK = gl.constexpr(16)  # what one wgmma reduces over: units of a token, or tokens


@gluon.constexpr_function
def accumulator(n):
    """[64 or 128, n] of one warpgroup."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, n, 16])


@gluon.constexpr_function
def rows_of(width):
    """Shared rows of `width` 16-bit elements, as wgmma and TMA want them."""
    return gl.NVMMASharedLayout(swizzle_byte_width=min(128, 2 * width), element_bitwidth=16, rank=2)


LOW_TO_F16 = gl.constexpr("{ .reg .b16 lo, hi; mov.b32 {lo, hi}, $1; cvt.rn.f16x2.e4m3x2 $0, lo; }")
HIGH_TO_F16 = gl.constexpr(
    "{ .reg .b16 lo, hi; mov.b32 {lo, hi}, $1; cvt.rn.f16x2.e4m3x2 $0, hi; }"
)
# Codes 2m, 2m + 1 of a token and of the next -> 2m of both, 2m + 1 of both.
BY_COLUMN = gl.constexpr("prmt.b32 $0, $1, 0, 0x3120;")


@gluon.jit
def halves(units, ASM: gl.constexpr):
    """The low or the high two of four codes, as fp16."""
    return gl.inline_asm_elementwise(ASM, "=r,r", [units], dtype=gl.float16, is_pure=True, pack=2)


@gluon.jit
def key_units(ring_a, ring_b, rope_ring, slot, c: gl.constexpr, OPERAND: gl.constexpr):
    """[64, 16] units of one tile: of the latent columns, behind them of the rope part."""
    if c < 8:
        units = ring_a.index(slot).slice(c * 16, 16, dim=1)
    elif c < 16:
        units = ring_b.index(slot).slice(c * 16 - 128, 16, dim=1)
    else:
        units = rope_ring.index(slot).slice(c * 16 - 256, 16, dim=1)
    return units.load(OPERAND)


@gluon.jit
def value_units(tile, c: gl.constexpr, OPERAND: gl.constexpr):
    """[units, CHUNK] of the c-th tokens."""
    return tile.slice(c * CHUNK, CHUNK, dim=0).permute((1, 0)).load(OPERAND)


@gluon.jit
def by_column(units):
    """value_units as a column's codes of two tokens, then the next's."""
    return gl.inline_asm_elementwise(
        BY_COLUMN, "=r,r", [units], dtype=gl.bfloat16, is_pure=True, pack=2
    )
