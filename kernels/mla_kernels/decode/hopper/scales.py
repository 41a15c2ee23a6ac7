# SPDX-License-Identifier: Apache-2.0
"""fp8_ds_mla on Hopper: how scales enter, with M a power of two near the largest one of a tile.

    tile   fp16, code * (scale / M), as K and as V
    S      (Q K^T of the latent part + Q / M K^T of the rope part) M
    P      2^(S + log2 M - k) in fp16, so that P V is in order; its row sums count P / M

M stays from tile to tile as long as the largest scale is from M / 2^DOWN to below 2 M 2^UP. So
scales of more than 2^-8 of the tile's largest keep the digits of bf16 in values of 2^-16 of 448
times the largest or more, and no value errs by more than that
(tests/kernels/decode/test_tile_scales.py).
"""

import math

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from mla_kernels.decode.hopper.layouts import VECTOR, WHOLE_SCALES
from mla_kernels.decode.triton.few_rows.operands import LEAST_SCALE
from mla_kernels.triton_common.gluon_compat import reinterpret

FIRST = gl.constexpr(-8)  # log2 M before any tile: of latents about 1
UP = gl.constexpr(5)  # 448 * 2^6 is below fp16's largest
DOWN = gl.constexpr(8)
# log2 of the least M, as few_rows has it, and of the largest.
LEAST = gl.constexpr(math.frexp(LEAST_SCALE.value)[1] - 1)
MOST = gl.constexpr(90)
# P is in fp16, which has 2^-24 to 2^16, with M in it: where tiles of very different M come together
# references lie this far below the maximum.
TILE_HEADROOM = gl.constexpr(6.0)
ZERO = gl.constexpr(-100)  # a tile of smaller scales, or without rows, leaves M as it is


@gluon.jit
def power_of_two(exponent):
    """2^exponent, of -126 to 127."""
    return ((exponent + 127) << 23).to(gl.float32, bitcast=True)


@gluon.jit
def one_over(m):
    """1 / m of a power of two, exactly."""
    return (0x7F000000 - m.to(gl.int32, bitcast=True)).to(gl.float32, bitcast=True)


@gluon.jit
def exponent_of(m):
    """log2 m of a power of two, as fp32."""
    return ((m.to(gl.int32, bitcast=True) >> 23) - 127).to(gl.float32)


@gluon.jit
def next_exponent(scales, exponent):
    """log2 M of a tile with these scales, [64, 4] in row order, behind one with `exponent`; every
    warp finds it for itself."""
    flat = reinterpret(scales, gl.int32, [256], VECTOR)
    bits = flat.load(WHOLE_SCALES) & 0x7FFFFFFF
    top = (gl.max(bits, 0) >> 23) - 127
    bounded = gl.minimum(gl.maximum(top, LEAST), MOST)
    low = (bounded < exponent - DOWN) & (top > ZERO)
    return gl.where((bounded > exponent + UP) | low, bounded, exponent)
