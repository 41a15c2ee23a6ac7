# SPDX-License-Identifier: Apache-2.0
"""With fp8_ds_mla the query's latent part is multiplied in fp16, as the keys are: the tile times a
power of two, so that it is below 4 in size, rounded to fp16 in place."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from mla_kernels.decode.hopper.fp8.query import (
    LEAST_SIZE,
    larger,
    size_of_largest,
    times,
    to_f16,
)
from mla_kernels.decode.hopper.layouts import BLOCK, PASS_64, TILE
from mla_kernels.triton_common.fp16_query import powers_of_two
from mla_kernels.triton_common.gluon_compat import reinterpret

BLOCKS = gl.constexpr(4)  # of 64 columns, in half of the latent part


@gluon.jit
def convert_query(tile_a, tile_b, tile_r, num_heads):
    """Turn [64, 256] halves of the latent part into fp16. tile_r: the rope part, which stays as it
    is, but counts. Returns the (down, up) of powers_of_two: all has to be multiplied by down, and
    scores by up."""
    zero = num_heads >> 31  # so that the loops stay loops: this runs once, and cold code is slow
    a = reinterpret(tile_a, gl.bfloat16, [BLOCKS, BLOCK, BLOCK], TILE)
    b = reinterpret(tile_b, gl.bfloat16, [BLOCKS, BLOCK, BLOCK], TILE)
    most = gl.full([BLOCK, BLOCK], LEAST_SIZE, gl.int16, PASS_64)
    most = larger(tile_r.load(PASS_64), most)
    for g in range(zero, BLOCKS + zero):
        most = larger(a.index(g).load(PASS_64), most)
        most = larger(b.index(g).load(PASS_64), most)
    down, up = powers_of_two(size_of_largest(most))
    for g in range(zero, BLOCKS + zero):
        half_a = to_f16(times(a.index(g).load(PASS_64), down))
        half_b = to_f16(times(b.index(g).load(PASS_64), down))
        a.index(g).store(half_a.to(gl.bfloat16, bitcast=True))
        b.index(g).store(half_b.to(gl.bfloat16, bitcast=True))
    return down, up
