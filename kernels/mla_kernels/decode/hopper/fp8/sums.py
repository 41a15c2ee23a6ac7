# SPDX-License-Identifier: Apache-2.0
"""Sums and maxima of query rows over a tile's tokens, which lie on the first axis.

With 64 rows a thread has 16 of them, of two tokens each. Three exchanges with a partner, after each
of which it keeps half of its rows, leave it two, of all the tokens of its warp: 14 shuffles, and 14
registers fewer where sums are kept from tile to tile.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2


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
def folded(x, AXIS: gl.constexpr, MOST: gl.constexpr):
    return gl.max(x, AXIS) if MOST else gl.sum(x, AXIS)


@gluon.jit
def of_warps(x, MOST: gl.constexpr):
    """[64, N] -> [4, N]: the sums over each warp's tokens, or the largest."""
    x = folded(gl.reshape(x, [4, 2, 8, x.shape[1]]), 1, MOST)
    if x.shape[2] == 64:
        x = gl.convert_layout(gl.reshape(x, [4, 2, 4, 64]), FIRST)
        x = gl.convert_layout(gl.reshape(folded(x, 1, MOST), [4, 2, 2, 64]), SECOND)
        x = gl.convert_layout(folded(x, 1, MOST), THIRD)
    return folded(x, 1, MOST)


ROWS_FIRST = gl.constexpr(
    gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[4, 1], instr_shape=[16, 8])
)


@gluon.jit
def no_sums(N: gl.constexpr):
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
    """[4, N], or [N, 4], times [N] shared."""
    L: gl.constexpr = sums.type.layout
    if sums.shape[0] == 4:
        return sums * factors.load(gl.SliceLayout(0, L))[None, :]
    else:
        return sums * factors.load(gl.SliceLayout(1, L))[:, None]
