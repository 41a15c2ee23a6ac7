# SPDX-License-Identifier: Apache-2.0
"""The query tile as B operand of the scores: both scores warpgroups turn half of it into fp16."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from mla_kernels.decode.hopper.fp8.operands import rows_of
from mla_kernels.decode.hopper.layouts import QUERY_TILE
from mla_kernels.decode.hopper.scales import FIRST, power_of_two
from mla_kernels.triton_common.fp16_query import powers_of_two
from mla_kernels.triton_common.gluon_compat import (
    PARTIAL_VIEWS,
    first_part,
    reinterpret,
    tma_load,
)

GROUP = gl.constexpr(32)  # columns that one thread reorders: two B operands of a product


@gluon.constexpr_function
def query_box(n):
    """Columns of the latent part that are loaded at once: all, which takes least code, where the
    blocks of `n` rows that they fill can be seen as one tile."""
    return 512 if n < 64 or PARTIAL_VIEWS.value else 64


@gluon.jit
def rope_block(query_rope, zero):
    """The rope part of the query: a block of its own, or with 64 rows behind those of the latent
    part, as they are converted alike.

    zero    0, or 0 from shared memory, as in products.py"""
    return query_rope.index(zero + query_rope.shape[0] - 1)


@gluon.jit
def load_query(q_desc, q_rope_desc, request, query, query_rope, full):
    """A request's rows of this program as they are, in blocks of 64 columns; rows past its last are
    zero."""
    N: gl.constexpr = query.shape[1]
    row = gl.program_id(0) * N
    mbarrier.expect(full, N * 576 * 2)
    if query_box(N) == 512:
        box = first_part(query, gl.bfloat16, [1, N, 512], QUERY_TILE)
        tma_load(q_desc, [request, row, 0], full, box)
    else:
        for i in gl.static_range(8):
            box = reinterpret(query.index(i), gl.bfloat16, [1, N, 64], QUERY_TILE)
            tma_load(q_desc, [request, row, 64 * i], full, box)
    box = reinterpret(rope_block(query_rope, 0), gl.bfloat16, [1, N, 64], QUERY_TILE)
    tma_load(q_rope_desc, [request, row, 0], full, box)


@gluon.constexpr_function
def by_groups(rows):
    """[rows, any columns] of a warpgroup, a group of a row a thread; 16-byte accesses of eight
    threads meet no bank twice."""
    down = min(4, max(1, rows // 16))
    return gl.BlockedLayout([1, GROUP.value], [16, 2], [down, 4 // down], [1, 0])


# The larger size of two pairs of bf16, as int16 above 127. Infinities and NaN are negative there:
# one row's must not take the others' digits.
LARGER = gl.constexpr(
    """{
    .reg .b32 size;
    and.b32 size, $1, 0x7fff7fff;
    add.u32 size, size, 0x00800080;
    max.s16x2 $0, size, $2;
    }"""
)
LEAST_SIZE = gl.constexpr(0x80)
TO_F16 = gl.constexpr(
    """{
    .reg .b32 low, high;
    shl.b32 low, $1, 16;
    and.b32 high, $1, 0xffff0000;
    cvt.rn.f16x2.f32 $0, high, low;
    }"""
)


@gluon.jit
def larger(x, most):
    """The larger of the sizes of bf16 numbers and of those in `most`, int16."""
    return gl.inline_asm_elementwise(
        LARGER, "=r,r,r", [x, most], dtype=gl.int16, is_pure=True, pack=2
    )


@gluon.jit
def larger_size(a, b):
    return gl.inline_asm_elementwise(
        "max.s16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=gl.int16, is_pure=True, pack=2
    )


@gluon.jit
def size_of_largest(sizes):
    """fp32: the largest of all of them."""
    COUNT: gl.constexpr = sizes.numel
    top = gl.max(gl.reshape(sizes.to(gl.int32), [COUNT]), 0) - LEAST_SIZE
    return (top << 16).to(gl.float32, bitcast=True)


@gluon.jit
def times(x, factor):
    """bf16 times a power of two, two at a time."""
    factor = gl.zeros_like(x) + factor.to(gl.bfloat16)
    return gl.inline_asm_elementwise(
        "mul.rn.bf16x2 $0, $1, $2;", "=r,r,r", [x, factor],
        dtype=gl.bfloat16, is_pure=True, pack=2,
    )  # fmt: skip


@gluon.jit
def to_f16(x):
    return gl.inline_asm_elementwise(TO_F16, "=r,r", [x], dtype=gl.float16, is_pure=True, pack=2)


@gluon.jit
def pairs_apart(x):
    """Of every 32 columns the pairs 4u, 4u + 1 before the pairs 4u + 2, 4u + 3: what low and high
    codes are multiplied by (operands.py)."""
    N: gl.constexpr = x.shape[0]
    C: gl.constexpr = x.shape[1]
    x = gl.reshape(x, [N, C // GROUP, 8, 2, 2])
    return gl.reshape(gl.permute(x, (0, 1, 3, 2, 4)), [N, C])


@gluon.jit
def wide_blocks(query):
    """Blocks of 4096 elements, 32 a thread; with 64 rows the rope part is one."""
    N: gl.constexpr = query.shape[1]
    COUNT: gl.constexpr = query.shape[0] * N // 64
    return reinterpret(query, gl.bfloat16, [COUNT, N, 4096 // N], rows_of(64))


@gluon.jit
def rope_of(query_rope, zero):
    """[N, 64] bf16."""
    N: gl.constexpr = query_rope.shape[1]
    return reinterpret(rope_block(query_rope, zero), gl.bfloat16, [N, 64], rows_of(64))


@gluon.jit
def largest_of_thread(x):
    """Sizes, [N, C] by_groups -> [N, C // 32, 2]: the larger of each thread's even and odd."""
    N: gl.constexpr = x.shape[0]
    GROUPS: gl.constexpr = x.shape[1] // GROUP
    x = gl.reshape(x, [N, GROUPS, GROUP])
    for i in gl.static_range(4):
        x = gl.reshape(x, [N, GROUPS, 2, GROUP >> (i + 1)])
        left, right = gl.split(gl.permute(x, (0, 1, 3, 2)))
        x = larger_size(left, right)
    return x


@gluon.jit
def convert_query(
    query, query_rope, tops, full_tops, phase, zero, ME: gl.constexpr, SCALE_OF: gl.constexpr
):  # fmt: skip
    """Turn half of the bf16 query rows, by blocks, into B operands in place: fp16 below 4 in size,
    `pairs_apart`. Returns the power of two that this took away, which both warpgroups agree on by
    way of `tops`. With the second half the rope part likewise; with fp8_ds_mla it stays bf16, as it
    is ordered, and of SCALE_OF "tile" it is over the first M.

    zero    0, from shared memory: the compiler may not unroll the loops. This code runs once a
            segment, and fetching instructions is what it takes time for"""
    N: gl.constexpr = query.shape[1]
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    HALF: gl.constexpr = N // 16
    WITH_ROPE: gl.constexpr = ME if N == 64 else 0  # as another block
    over_first = power_of_two(gl.to_tensor(-FIRST))
    first = ME * HALF
    last = first + HALF + WITH_ROPE + zero
    last_latent = first + HALF + zero if SCALE_OF == "tile" else last
    blocks = wide_blocks(query)
    L: gl.constexpr = by_groups(N)
    most = gl.full([N, 4096 // N], LEAST_SIZE, gl.int16, L)
    for g in range(first, last):
        most = larger(blocks.index(g).load(L), most)
    if ME == 1 and N < 64:
        least = gl.full([N, 64], LEAST_SIZE, gl.int16, L)
        top = size_of_largest(larger(rope_of(query_rope, 0).load(L), least))
    else:
        top = gl.to_tensor(0.0)
    top = gl.maximum(top, size_of_largest(largest_of_thread(most)))
    tops.index(ME).store(gl.full([1], 0.0, gl.float32, ONE) + top)
    mbarrier.arrive(full_tops, count=1)
    mbarrier.wait(full_tops, phase)
    down, up = powers_of_two(gl.maximum(top, gl.max(tops.index(1 - ME).load(ONE), 0)))
    for g in range(first, last):
        x = times(blocks.index(g).load(L), down)
        if g < last_latent:
            blocks.index(g).store(pairs_apart(to_f16(x)).to(gl.bfloat16, bitcast=True))
        else:
            blocks.index(g).store(times(x, over_first))
    if ME == 1 and N < 64:
        values = times(rope_of(query_rope, 0).load(L), down)
        if SCALE_OF == "tile":
            values = times(values, over_first)
        if SCALE_OF == "cache":
            values = pairs_apart(to_f16(values)).to(gl.bfloat16, bitcast=True)
        rope_of(query_rope, 0).store(values)
    return up
