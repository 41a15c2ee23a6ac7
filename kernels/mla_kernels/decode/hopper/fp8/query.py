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


LARGER = gl.constexpr("{ .reg .b32 x; abs.bf16x2 x, $1; max.bf16x2 $0, x, $2; }")
TIMES_TO_F16 = gl.constexpr(
    """{
    .reg .f32 low, high;
    shl.b32 low, $1, 16;
    and.b32 high, $1, 0xffff0000;
    mul.f32 low, low, $2;
    mul.f32 high, high, $3;
    cvt.rn.f16x2.f32 $0, high, low;
    }"""
)


@gluon.jit
def larger(x, most):
    """The larger of |x| and most, bf16."""
    return gl.inline_asm_elementwise(
        LARGER, "=r,r,r", [x, most], dtype=gl.bfloat16, is_pure=True, pack=2
    )


@gluon.jit
def times_to_f16(x, factor):
    """bf16 times an fp32 scalar, as fp16."""
    factor = gl.zeros_like(x).to(gl.float32) + factor
    return gl.inline_asm_elementwise(
        TIMES_TO_F16, "=r,r,r,r", [x, factor], dtype=gl.float16, is_pure=True, pack=2
    )


@gluon.jit
def query_block(query, g, L: gl.constexpr):
    return query.index(g).load(L).to(gl.bfloat16, bitcast=True)


@gluon.jit
def convert_query(query, rope, GROUPED: gl.constexpr):
    """Turn the bf16 query rows in [8, N, 64] into B operands in place: blocks 2j and 2j + 1 become
    the columns a and b of both, fp16 below 2 in size. Returns the power of two that this took
    away. The rope part [N, 64] likewise, a before b; if GROUPED it stays bf16."""
    N: gl.constexpr = rope.shape[0]
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    most = larger(rope.load(L), gl.zeros([N, 64], gl.bfloat16, L))
    for g in range(8):
        most = larger(query_block(query, g, L), most)
    down, up = powers_of_two(gl.max(gl.reshape(most.to(gl.float32), [N * 64]), 0))
    for j in range(4):
        left_a, left_b = query_pairs(times_to_f16(query_block(query, 2 * j, L), down))
        right_a, right_b = query_pairs(times_to_f16(query_block(query, 2 * j + 1, L), down))
        query.index(2 * j).slice(0, 32, dim=1).store(left_a)
        query.index(2 * j).slice(32, 32, dim=1).store(right_a)
        query.index(2 * j + 1).slice(0, 32, dim=1).store(left_b)
        query.index(2 * j + 1).slice(32, 32, dim=1).store(right_b)
    values = rope.load(L)
    if GROUPED:
        rope.store((values.to(gl.float32) * down).to(gl.bfloat16))
    else:
        a, b = query_pairs(times_to_f16(values, down))
        rope.slice(0, 32, dim=1).store(a.to(gl.bfloat16, bitcast=True))
        rope.slice(32, 32, dim=1).store(b.to(gl.bfloat16, bitcast=True))
    return up
