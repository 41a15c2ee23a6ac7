# SPDX-License-Identifier: Apache-2.0
"""Layouts of the fp8-query kernel, and the conversions into what fp8 wgmma multiplies.

fp8 wgmma wants both operands with the reduced axis innermost. A cache tile is so for the scores.
For P V it is not: V^T comes by way of registers, as 16-bit units of two neighbouring columns, whose
bytes are then sorted by column. That leaves a thread the tokens 2t, 2t + 1, 2t + 8, 2t + 9 of 16
where an fp8 operand has 4t to 4t + 3, so P has its tokens in that order too: `in_order`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

STEP = gl.constexpr(32)  # tokens or columns that one wgmma reduces over


def _accumulator(k: int) -> gl.constexpr:
    return gl.constexpr(
        gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, k])
    )


# S [64 rows, 64 tokens]; a quarter of a warpgroup's O^T, [64 units, 64 rows].
ACCUMULATOR = _accumulator(32)
OPERAND = gl.constexpr(gl.DotOperandLayout(0, ACCUMULATOR.value, 4))
UNITS = gl.constexpr(gl.DotOperandLayout(0, _accumulator(16).value, 2))
# P with its tokens `in_order`: a thread has four neighbours, and can store them at once.
WEIGHTS = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [8, 0], [0, 16], [0, 32]],
        lane_bases=[[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, 64],
    )
)


def _shared(bits: int, width: int, rank: int = 2) -> gl.constexpr:
    return gl.constexpr(
        gl.NVMMASharedLayout(swizzle_byte_width=width, element_bitwidth=bits, rank=rank)
    )


# Rows of 16-bit units as TMA fills them, and of the codes in the same memory.
LATENT_UNITS, ROPE_UNITS = _shared(16, 128), _shared(16, 64)
LATENT_CODES, ROPE_CODES = _shared(8, 128), _shared(8, 64)
# The same memory as TMA fills it from the queries of one request, [1, 64, units].
QUERY_LATENT = gl.constexpr(
    gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3)
)
QUERY_ROPE = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=16, rank=3))

EVEN = gl.constexpr("prmt.b32 $0, $1, $2, 0x6420;")
ODD = gl.constexpr("prmt.b32 $0, $1, $2, 0x7531;")
TO_E4M3 = gl.constexpr(
    """{
    .reg .b16 low, high;
    cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
    cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
    mov.b32 $0, {low, high};
    }"""
)


@gluon.jit
def in_order(x):
    """The last axis: tokens 2t, 2t + 1, 2t + 8, 2t + 9 of 16 become neighbours."""
    M: gl.constexpr = x.shape[0]
    N: gl.constexpr = x.shape[1]
    x = gl.permute(gl.reshape(x, [M, N // 16, 2, 4, 2]), (0, 1, 3, 2, 4))
    return gl.reshape(x, [M, N])


@gluon.jit
def value_units(tile, c: gl.constexpr):
    """[64 units, STEP] of the c-th tokens of a tile [64, 64 units]."""
    units = tile.slice(c * STEP, STEP, dim=0).permute((1, 0)).load(UNITS)
    return gl.convert_layout(in_order(units.to(gl.int16, bitcast=True)), OPERAND)


@gluon.jit
def columns(units, ASM: gl.constexpr):
    """The codes of the even or the odd columns."""
    return gl.inline_asm_elementwise(
        ASM, "=r,r,r", [units], dtype=gl.float8e4nv, is_pure=True, pack=4
    )


@gluon.jit
def to_e4m3(p):
    """fp32 to e4m3, in the layout WEIGHTS."""
    return gl.inline_asm_elementwise(
        TO_E4M3, "=r,r,r,r,r", [p], dtype=gl.float8e4nv, is_pure=True, pack=4
    )
