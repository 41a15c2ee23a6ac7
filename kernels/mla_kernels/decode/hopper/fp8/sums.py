# SPDX-License-Identifier: Apache-2.0
"""Sums and maxima of query rows over a tile's tokens, which lie on the first axis.

With 64 rows a thread has 16 of them, of two tokens each. Three exchanges with a partner, after each
of which it keeps half of its rows, leave it two, of all the tokens of its warp.
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


@gluon.jit
def at_factors(sums, factors):
    """[4, N] times [N] shared."""
    L: gl.constexpr = sums.type.layout
    return sums * factors.load(gl.SliceLayout(0, L))[None, :]


@gluon.jit
def of_all(x, MOST: gl.constexpr):
    """[4, N] -> [N]: over the warps; 64 rows in two halves, in the same scratch memory."""
    if x.shape[1] == 64:
        even, odd = gl.split(gl.reshape(x, [4, 32, 2]))
        return gl.reshape(gl.join(folded(even, 0, MOST), folded(odd, 0, MOST)), [64])
    else:
        return folded(x, 0, MOST)


# [16, 64], a warp 16 columns.
SUMS = gl.constexpr(
    gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[1, 4], instr_shape=[16, 8])
)


@gluon.jit
def add_sums(p, sums):
    """Add the sums over the tokens of p [64 tokens, 64 rows], shared, to every row of `sums`."""
    ones = gl.full([16, p.shape[0]], 1.0, p.dtype, gl.DotOperandLayout(0, SUMS, 2))
    return mma_v2(ones, p.load(gl.DotOperandLayout(1, SUMS, 2)), sums)
