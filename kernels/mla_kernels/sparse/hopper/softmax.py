# SPDX-License-Identifier: Apache-2.0
"""Online softmax of one tile of scores: the dense kernel's pow2 step (decode/hopper/softmax.py)
with the mask in what puts the scores on the grid."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from mla_kernels import numerics
from mla_kernels.decode.hopper.layouts import BLOCK
from mla_kernels.decode.hopper.scales import exponent_of, one_over
from mla_kernels.decode.hopper.softmax import (
    EXPONENT_FLOOR,
    GRID_OFFSET,
    pow2_int,
    round_bf16,
    unpack_bf16,
)
from mla_kernels.sparse.hopper.layouts import SUMS, SUMS_ROW

TAU = gl.constexpr(numerics.TAU)


@gluon.jit
def add_row_sums(l, factor, p, weight):
    """l * factor plus the eight partial sums of each row of p, times weight."""
    sums = gl.sum(gl.reshape(p, [BLOCK, 8, 8]), 1)
    return l * gl.convert_layout(factor, SUMS_ROW)[:, None] + gl.convert_layout(sums, SUMS) * weight


@gluon.jit
def softmax_step(
    s, offset, m, k, l, top, scale_log2, MAX_LOGITS: gl.constexpr, FP8: gl.constexpr
):  # fmt: skip
    """(P, what O is multiplied by, k', l', top') of a tile of scores. offset [64]: the grid, or
    -inf where there is no row. top: the largest scores so far, with MAX_LOGITS off the grid, which
    is too coarse for those. With FP8 s is the scores over m, and P has m in it."""
    s, offset = gl.broadcast(s, offset[None, :])
    shift = 0.0
    if FP8:
        scale_log2 = scale_log2 * m
        shift = exponent_of(m)
    t = gl.fma(s, scale_log2, offset)
    if MAX_LOGITS:
        largest = gl.max(gl.fma(s, scale_log2, offset - GRID_OFFSET), 1)
        top = gl.maximum(top, largest)
        largest = largest + shift
    else:
        largest = gl.max(t, 1) - (GRID_OFFSET - shift)
    row_max = gl.maximum(gl.ceil(largest), EXPONENT_FLOOR)
    k_new = gl.where(row_max > k + TAU, row_max, k)
    factor = pow2_int(k - k_new)
    weights = gl.exp2(t - (k_new + (GRID_OFFSET - shift))[:, None])
    if FP8:
        p = weights.to(gl.float16)
        l = add_row_sums(l, factor, weights, one_over(m))
    else:
        p = round_bf16(weights)
        l = add_row_sums(l, factor, unpack_bf16(p), 1.0)
    return p, factor, k_new, l, top
