# SPDX-License-Identifier: Apache-2.0
"""Pieces of the softmax over tokens, which lie on the first axis of a tile of scores."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def round_f16(x):
    return gl.inline_asm_elementwise(
        "cvt.rn.f16x2.f32 $0, $2, $1;",
        "=r,r,r",
        [x],
        dtype=gl.float16,
        is_pure=True,
        pack=2,
    )


@gluon.jit
def pair_max(x):
    return gl.max(gl.reshape(x, [4, 2, 8, x.shape[1]]), 1)


@gluon.constexpr_function
def any_above(limit):
    return f"""{{
    .reg .pred any;
    setp.gt.f32 any, $1, {limit:.1f};
    vote.sync.any.pred any, any, 0xffffffff;
    selp.b32 $0, 1, 0, any;
}}"""


@gluon.jit
def any_moves(above, limit: gl.constexpr, votes):
    """Whether one of [4, 8, N] is above `limit`: 1 or 0. A thread looks at its own, a warp votes;
    votes is shared memory for [32, 4] int32, of all lanes, as that needs no shuffles."""
    N: gl.constexpr = above.shape[2]
    ASM: gl.constexpr = any_above(limit)
    own = gl.max(gl.max(gl.reshape(above, [4, 8, N // 8, 4, 2]), 4), 2)
    vote = gl.inline_asm_elementwise(ASM, "=r,f", [own], dtype=gl.int32, is_pure=True, pack=1)
    votes.store(gl.permute(gl.reshape(vote, [4, 32]), (1, 0)))
    of_warps = votes.slice(0, 1, dim=0).load(gl.BlockedLayout([1, 4], [32, 1], [4, 1], [1, 0]))
    return gl.max(gl.max(of_warps, 1), 0)
