# SPDX-License-Identifier: Apache-2.0
"""Sums and maxima of query rows over a tile's tokens, which lie on the first axis.

Sums, up to 32 rows: a thread adds up its own two tokens of each tile, and threads meet at the end
of a segment. With more rows this would take 16 registers, which there are not: P^T is multiplied
with ones.

Maxima of 64 rows: three exchanges with a partner, after each of which a thread keeps half of its 16
rows, leave it two, of all the tokens of its warp: 14 shuffles.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from mla_kernels.decode.hopper.fp8.operands import accumulator


@gluon.constexpr_function
def _layout(shape, registers, lanes):
    warps = [[0] * len(shape) for _ in range(2)]
    warps[0][0], warps[1][0] = 1, 2
    return gl.DistributedLinearLayout(
        reg_bases=registers, lane_bases=lanes, warp_bases=warps, block_bases=[], shape=shape
    )


FIRST = gl.constexpr(
    _layout(
        [4, 2, 4, 64],
        [[0, 0, 0, 1], [0, 1, 0, 0], [0, 0, 0, 16], [0, 0, 0, 32]],
        [[0, 0, 0, 2], [0, 0, 0, 4], [0, 0, 1, 0], [0, 0, 2, 0], [0, 0, 0, 8]],
    )
)
SECOND = gl.constexpr(
    _layout(
        [4, 2, 2, 64],
        [[0, 0, 0, 1], [0, 1, 0, 0], [0, 0, 0, 32]],
        [[0, 0, 0, 2], [0, 0, 0, 4], [0, 0, 1, 0], [0, 0, 0, 16], [0, 0, 0, 8]],
    )
)
THIRD = gl.constexpr(
    _layout(
        [4, 2, 64],
        [[0, 0, 1], [0, 1, 0]],
        [[0, 0, 2], [0, 0, 4], [0, 0, 32], [0, 0, 16], [0, 0, 8]],
    )
)


@gluon.jit
def most_of_warps(x):
    """[64, N] -> [4, N]: the largest of each warp's tokens."""
    x = gl.max(gl.reshape(x, [4, 2, 8, x.shape[1]]), 1)
    if x.shape[2] == 64:
        x = gl.convert_layout(gl.reshape(x, [4, 2, 4, 64]), FIRST)
        x = gl.convert_layout(gl.reshape(gl.max(x, 1), [4, 2, 2, 64]), SECOND)
        x = gl.convert_layout(gl.max(x, 1), THIRD)
    return gl.max(x, 1)


@gluon.jit
def of_pairs(x):
    """[64, N] -> [4, 8, N]: the sums over the two tokens of each thread."""
    return gl.sum(gl.reshape(x, [4, 2, 8, x.shape[1]]), 1)


@gluon.jit
def along_pairs(x, L: gl.constexpr):
    """[N] to broadcast over [4, 8, N]."""
    x = gl.convert_layout(x, gl.SliceLayout(0, gl.SliceLayout(0, L)), assert_trivial=True)
    return gl.expand_dims(gl.expand_dims(x, 0), 0)


@gluon.jit
def not_hoisted(x):
    """x, 16 bits wide. What is computed from this stays behind what precedes it in the program."""
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=2
    )


# Rows whose sums lie in registers, [4, 8, N]; those of more are [N, 4].
IN_REGISTERS = gl.constexpr(32)
ROWS_FIRST = gl.constexpr(
    gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[4, 1], instr_shape=[16, 8])
)


@gluon.jit
def no_sums(N: gl.constexpr):
    if N <= IN_REGISTERS:
        return of_pairs(gl.zeros([64, N], gl.float32, accumulator(N)))
    else:
        zero = gl.zeros([N, 8], gl.float32, ROWS_FIRST)
        left, _right = gl.split(gl.reshape(zero, [N, 4, 2]))
        return left


@gluon.jit
def by_products(p):
    """P^T [64, N] fp16 in shared memory -> [N, 4]: each row's sum, four times. As products with
    ones these are 8 instructions, where adding up takes 150."""
    N: gl.constexpr = p.shape[1]
    rows = p.permute((1, 0)).load(gl.DotOperandLayout(0, ROWS_FIRST, 2))
    ones = gl.full([64, 8], 1.0, gl.float16, gl.DotOperandLayout(1, ROWS_FIRST, 2))
    sums = mma_v2(rows, ones, gl.zeros([N, 8], gl.float32, ROWS_FIRST))
    left, _right = gl.split(gl.reshape(sums, [N, 4, 2]))
    return left


@gluon.jit
def at_factors(sums, factors):
    """Times `factors` [N], shared."""
    L: gl.constexpr = sums.type.layout
    if len(sums.shape) == 3:
        N: gl.constexpr = sums.shape[2]
        return sums * along_pairs(factors.load(gl.SliceLayout(0, accumulator(N))), L)
    else:
        return sums * factors.load(gl.SliceLayout(1, L))[:, None]


@gluon.jit
def of_rows(sums):
    """[N]: of all threads."""
    if len(sums.shape) == 3:
        return gl.sum(gl.sum(sums, 1), 0)
    else:
        return gl.max(sums, 1)  # the same four times
