# SPDX-License-Identifier: Apache-2.0
"""What warpgroups 1 and 2 have in common: P V and the store of O."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from mla_kernels.decode.hopper.layouts import BLOCK, HALF, OUTPUT_COL, OUTPUT_ROW
from mla_kernels.decode.hopper.softmax import rescale
from mla_kernels.sparse.hopper.layouts import STORE

LATENT = gl.constexpr(512)


@gluon.jit
def start_values(acc, p_ring, tile, factors, ip):
    """O at P's reference, plus P V, asynchronous."""
    acc = rescale(acc, factors.index(ip), "pow2")
    return warpgroup_mma(p_ring.index(ip), tile, acc, is_async=True)


@gluon.jit
def finish_values(token, empty_p, ip):
    acc = warpgroup_mma_wait(0, deps=(token,))
    mbarrier.arrive(empty_p.index(ip), count=1)
    return acc


@gluon.jit
def add_values(acc, p_ring, tile, factors, empty_p, ip):
    return finish_values(start_values(acc, p_ring, tile, factors, ip), empty_p, ip)


@gluon.jit
def store_whole(acc, inverse_row, of_token, first_head, num_heads, COL: gl.constexpr):
    """Write one half of a token's O, 16 bytes a thread."""
    acc = gl.convert_layout((acc * inverse_row[:, None]).to(gl.bfloat16), STORE)
    head = first_head + gl.arange(0, BLOCK, gl.SliceLayout(1, STORE))
    at = head[:, None] * LATENT + (COL + gl.arange(0, HALF, gl.SliceLayout(0, STORE)))[None, :]
    gl.store(of_token + at, acc, mask=(head < num_heads)[:, None])


@gluon.jit
def store_part(acc, of_part, first_head, num_heads, COL: gl.constexpr):
    """Write one half of a partial O, that of one of a token's programs."""
    head = first_head + gl.arange(0, BLOCK, OUTPUT_ROW)
    at = head[:, None] * LATENT + (COL + gl.arange(0, HALF, OUTPUT_COL))[None, :]
    gl.store(of_part + at, acc, mask=(head < num_heads)[:, None])


@gluon.jit
def store_range(acc, part_acc, token, first_head, num_heads, COL: gl.constexpr):
    """The same of this program's range, where a token's ranges are as many as programs."""
    first = (token * gl.num_programs(1) + gl.program_id(1)) * num_heads
    store_part(acc, part_acc + first * LATENT, first_head, num_heads, COL)


@gluon.jit
def store_output(
    acc, out, part_acc, inverse, full_out, token, first_head, num_heads,
    COL: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    """Write one half of O: the result, or this range's part of one that is merged later."""
    if SPLIT:
        store_range(acc, part_acc, token, first_head, num_heads, COL)
    else:
        mbarrier.wait(full_out, 0)
        of_token = out + token * num_heads * LATENT
        store_whole(acc, inverse.load(OUTPUT_ROW), of_token, first_head, num_heads, COL)
