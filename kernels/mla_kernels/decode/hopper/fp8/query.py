# SPDX-License-Identifier: Apache-2.0
"""The query tile as B operand of the scores."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from mla_kernels.decode.hopper.gluon_compat import tma_load
from mla_kernels.decode.hopper.layouts import QUERY_TILE
from mla_kernels.decode.triton.few_rows.operands import powers_of_two, query_pairs


@gluon.jit
def load_query(q_desc, q_rope_desc, request, query, rope, full):
    """A request's rows of this program as they are, in blocks of 64 columns; rows past its last
    are zero."""
    N: gl.constexpr = rope.shape[0]
    row = gl.program_id(0) * N
    mbarrier.expect(full, N * 576 * 2)
    for g in gl.static_range(8):
        box = query.index(g)._reinterpret(gl.bfloat16, [1, N, 64], QUERY_TILE)
        tma_load(q_desc, [request, row, g * 64], full, box)
    box = rope._reinterpret(gl.bfloat16, [1, N, 64], QUERY_TILE)
    tma_load(q_rope_desc, [request, row, 0], full, box)


@gluon.jit
def query_block(query, g: gl.constexpr, L: gl.constexpr):
    return query.index(g).load(L).to(gl.bfloat16, bitcast=True).to(gl.float32)


@gluon.jit
def convert_query(query, rope, rope_a, rope_b, GROUPED: gl.constexpr):
    """Turn the bf16 query rows in [8, N, 64] into B operands in place: blocks 2j and 2j + 1 become
    the columns a and b of both, fp16 below 2 in size. Returns the power of two that this took
    away. The rope part [N, 64] likewise into rope_a and rope_b, but stays as it is if GROUPED."""
    N: gl.constexpr = rope.shape[0]
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    most = gl.zeros([N, 64], gl.float32, L)
    for g in gl.static_range(8):
        most = gl.maximum(most, gl.abs(query_block(query, g, L)))
    if not GROUPED:
        most = gl.maximum(most, gl.abs(rope.load(L).to(gl.float32)))
    down, up = powers_of_two(gl.max(gl.reshape(most, [N * 64]), 0))
    for j in gl.static_range(4):
        left_a, left_b = query_pairs((query_block(query, 2 * j, L) * down).to(gl.float16))
        right_a, right_b = query_pairs((query_block(query, 2 * j + 1, L) * down).to(gl.float16))
        query.index(2 * j).slice(0, 32, dim=1).store(left_a)
        query.index(2 * j).slice(32, 32, dim=1).store(right_a)
        query.index(2 * j + 1).slice(0, 32, dim=1).store(left_b)
        query.index(2 * j + 1).slice(32, 32, dim=1).store(right_b)
    if not GROUPED:
        a, b = query_pairs((rope.load(L).to(gl.float32) * down).to(gl.float16))
        rope_a.store(a)
        rope_b.store(b)
    return up
