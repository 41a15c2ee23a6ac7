# SPDX-License-Identifier: Apache-2.0
"""Pieces of the softmax over tokens, which lie on the first axis of a tile of scores."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from mla_kernels import numerics
from mla_kernels.decode.hopper.layouts import BLOCK, SCALES_READ
from mla_kernels.triton_common.gluon_compat import reinterpret


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
def log2(x):
    """Of normal numbers, to 2^-22."""
    return gl.inline_asm_elementwise(
        "lg2.approx.ftz.f32 $0, $1;",
        "=f,f",
        [x],
        dtype=gl.float32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def store_ratios(scales, inverse, target):
    """Each group's scale of a token over its largest, as fp16, [4 * 64]."""
    left = gl.join(scales[0] * inverse, scales[1] * inverse)
    right = gl.join(scales[2] * inverse, scales[3] * inverse)
    ratio = gl.permute(gl.join(left, right), (2, 1, 0))  # [group // 2, group % 2, token]
    target.store(gl.reshape(ratio, [4 * BLOCK]).to(gl.float16))


@gluon.jit
def sum_of_groups(groups, scales):
    """S^T from group_scores' sums and the scales of each token."""
    s = groups[4]
    for g in gl.static_range(4):
        s = gl.fma(groups[g], scales[g][:, None] + gl.zeros_like(s), s)
    return s


@gluon.jit
def store_planes(p, scales, inverse, target):
    """P^T for each group's values, [4 * 64, N]: times the group's scale of a token over the
    largest."""
    parts = ()
    for g in gl.static_range(4):
        part = round_f16(p * (scales[g] * inverse)[:, None])
        parts = parts + (part,)  # type: ignore  # noqa: RUF005
    planes = gl.join(gl.join(parts[0], parts[1]), gl.join(parts[2], parts[3]))  # type: ignore
    planes = gl.permute(planes, (3, 2, 0, 1))  # [group // 2, group % 2, token, row]
    target.store(gl.reshape(planes, [4 * BLOCK, p.shape[1]]))


@gluon.jit
def load_scale(scales, g: gl.constexpr, L: gl.constexpr):
    """fp32 [64]: the scale of group g of each token."""
    scales = reinterpret(scales, gl.float32, [BLOCK, 4], SCALES_READ)
    return gl.max(scales.slice(g, 1, dim=1).load(L.parent), 1)


@gluon.jit
def pair_max(x):
    return gl.max(gl.reshape(x, [4, 2, 8, x.shape[1]]), 1)


ANY_ABOVE = gl.constexpr(f"""{{
    .reg .pred any;
    setp.gt.f32 any, $1, {numerics.TAU:.1f};
    vote.sync.any.pred any, any, 0xffffffff;
    selp.b32 $0, 1, 0, any;
}}""")


@gluon.jit
def any_moves(above, votes):
    """Whether one of [4, 8, N] is above TAU: 1 or 0. A thread looks at its own, a warp votes;
    votes is shared memory for [32, 4] int32, of all lanes, as that needs no shuffles."""
    N: gl.constexpr = above.shape[2]
    own = gl.max(gl.max(gl.reshape(above, [4, 8, N // 8, 4, 2]), 4), 2)
    vote = gl.inline_asm_elementwise(ANY_ABOVE, "=r,f", [own], dtype=gl.int32, is_pure=True, pack=1)
    votes.store(gl.permute(gl.reshape(vote, [4, 32]), (1, 0)))
    of_warps = votes.slice(0, 1, dim=0).load(gl.BlockedLayout([1, 4], [32, 1], [4, 1], [1, 0]))
    return gl.max(gl.max(of_warps, 1), 0)
