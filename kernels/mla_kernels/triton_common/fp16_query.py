# SPDX-License-Identifier: Apache-2.0
"""Queries as fp16 below 4 in size, for products with e4m3 codes; a power of two is taken away.

What fp16 cannot hold of a score is below 2^-24 of the tile's largest.
"""

import triton
import triton.language as tl


@triton.jit
def largest_number(x):
    """The largest size in x, fp32, of what is no infinity and no NaN: one row's must not take the
    others' digits."""
    size = tl.abs(x.to(tl.float32))
    return tl.max(tl.where(size < float("inf"), size, 0.0))


@triton.jit
def powers_of_two(top):
    """(down, up), fp32: top * down is in [1, 2), below 2 for tiny ones and 0, and in [2, 4) from
    2^127 on, whose inverse fp32 rounds to 0. up = 1 / down."""
    exponent = (top.to(tl.int32, bitcast=True) >> 23) - 127
    exponent = tl.minimum(tl.maximum(exponent, -100), 126)
    down = ((127 - exponent) << 23).to(tl.float32, bitcast=True)
    up = ((127 + exponent) << 23).to(tl.float32, bitcast=True)
    return down, up


@triton.jit
def to_fp16(x, down):
    return (x.to(tl.float32) * down).to(tl.float16)
