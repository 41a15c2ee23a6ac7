# SPDX-License-Identifier: Apache-2.0
"""Operands of mma.sync from tiles of 16-bit units (copies.py), as Gluon device functions.

e4m3 codes become fp16, exactly, in the registers that the tensor cores read. ldmatrix moves two
neighbouring codes as one unit:

    q K^T (k runs over d)       a register holds codes 4m .. 4m + 3 of a token: the columns `a` 4m,
                                4m + 1 and `b` 4m + 2, 4m + 3 of K. q comes in the same order.
    P V   (k runs over tokens)  it holds codes 2m, 2m + 1 of two tokens: the columns `a` 2m and
                                `b` 2m + 1 of V.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# A token whose scales are all smaller counts as if they were this.
LEAST_SCALE = gl.constexpr(2.0**-30)

KEYS_TO_F16 = gl.constexpr(
    """{
    .reg .b16 lo, hi;
    mov.b32 {lo, hi}, $2;
    cvt.rn.f16x2.e4m3x2 $0, lo;
    cvt.rn.f16x2.e4m3x2 $1, hi;
    }"""
)
VALUES_TO_F16 = gl.constexpr(
    """{
    .reg .b16 lo, hi;
    .reg .b32 x;
    prmt.b32 x, $2, 0, 0x3120;
    mov.b32 {lo, hi}, x;
    cvt.rn.f16x2.e4m3x2 $0, lo;
    cvt.rn.f16x2.e4m3x2 $1, hi;
    }"""
)


@gluon.jit
def codes_to_f16(units, ASM: gl.constexpr):
    """Units of two codes -> (a, b), fp16."""
    return gl.inline_asm_elementwise(
        ASM, "=r,=r,r", [units], dtype=(gl.float16, gl.float16), is_pure=True, pack=2
    )


@gluon.jit
def query_pairs(x):
    """[..., N] -> the columns (a, b), [..., N // 2] each, in the order of K's."""
    RANK: gl.constexpr = len(x.shape)
    N: gl.constexpr = x.shape[RANK - 1]
    if RANK == 3:
        x = gl.reshape(x, [x.shape[0], x.shape[1], N // 4, 2, 2])
        a, b = gl.split(gl.permute(x, [0, 1, 2, 4, 3]))
        a = gl.reshape(a, [a.shape[0], a.shape[1], N // 2])
        b = gl.reshape(b, [b.shape[0], b.shape[1], N // 2])
    else:
        x = gl.reshape(x, [x.shape[0], N // 4, 2, 2])
        a, b = gl.split(gl.permute(x, [0, 1, 3, 2]))
        a = gl.reshape(a, [a.shape[0], N // 2])
        b = gl.reshape(b, [b.shape[0], N // 2])
    return a, b


@gluon.jit
def staged(x, shared, LAYOUT: gl.constexpr):
    """x in another layout, by way of shared memory of another 16-bit type."""
    shared.store(x.to(shared.dtype, bitcast=True))
    return shared.load(LAYOUT).to(x.dtype, bitcast=True)
