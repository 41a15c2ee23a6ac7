# SPDX-License-Identifier: Apache-2.0
"""The softmax of one tile of scores [64, 64] that two warpgroups share, 32 tokens each.

k and l are [64, 8]: of a row, what each of its eight lanes has. k is the same in all of them, l the
sum of a lane's own weights.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from mla_kernels import numerics

GRID_OFFSET = gl.constexpr(numerics.GRID_OFFSET)
TAU = gl.constexpr(numerics.TAU)
SCORES = gl.constexpr(
    gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 2], instr_shape=[16, 32, 16])
)
LANES = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[8, 0]],
        lane_bases=[[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0], [0, 4]],
        block_bases=[],
        shape=[64, 8],
    )
)


@gluon.jit
def by_lane(x):
    """[64, 64] SCORES as [64, warpgroup 2, 4, lane 4, 2]."""
    return gl.reshape(x, [64, 2, 4, 4, 2])


@gluon.jit
def of_lanes(x):
    """[64, 2, 4] to [64, 8] LANES."""
    return gl.convert_layout(gl.reshape(x, [64, 8]), LANES)


@gluon.jit
def along_rows(x, like):
    """[64, 8] LANES to [64, 2, 1, 4, 1], to be broadcast to `like`."""
    ROWS: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(4, like.type.layout))
    x = gl.convert_layout(gl.reshape(x, [64, 2, 4]), ROWS)
    return gl.expand_dims(gl.expand_dims(x, 2), 4)


@gluon.jit
def round_pairs(x, DTYPE: gl.constexpr):
    """fp32 -> bf16 or fp16, two at a time."""
    if DTYPE == gl.bfloat16:
        return gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=gl.bfloat16, is_pure=True, pack=2
        )
    else:
        return gl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=gl.float16, is_pure=True, pack=2
        )


# Whether one of a warp's rows has passed k + TAU: $2, $3 are the largest of a lane's own scores in
# its two rows, $4, $5 their k.
PASSED = gl.constexpr(f"""{{
    .reg .pred any; .reg .f32 a, b;
    add.f32 a, $4, {numerics.TAU:.1f}; add.f32 b, $5, {numerics.TAU:.1f};
    setp.gt.f32 any, $2, a; setp.gt.or.f32 any, $3, b, any;
    vote.sync.any.pred any, any, 0xffffffff;
    selp.u32 $0, 1, 0, any; mov.u32 $1, $0;
}}""")


@gluon.jit
def any_passed(flags):
    """Whether a warp has stored 1 to flags [64, 8], of which it has rows 16 w and lanes 4 g on."""
    SEEN: gl.constexpr = gl.BlockedLayout([4, 1, 2, 1], [1, 32, 1, 1], [1, 8, 1, 1], [3, 2, 1, 0])
    return gl.max(gl.reshape(flags.load(SEEN), [8]), 0)


@gluon.jit
def weights_of(t, k, DTYPE: gl.constexpr):
    """P = 2^(t - k), rounded, and the sums of each lane's own."""
    p = round_pairs(gl.exp2(t - along_rows(k + GRID_OFFSET, t)), DTYPE)
    sums = of_lanes(gl.sum(gl.sum(p.to(gl.float32), 4), 2))
    return gl.convert_layout(gl.reshape(p, [64, 64]), SCORES), sums


@gluon.jit
def grid_scores(s, k, scale_log2):
    """(scores on the grid by lane, each lane's largest, whether a row of the warp passed k)."""
    t = gl.fma(by_lane(s), scale_log2, GRID_OFFSET)
    top = of_lanes(gl.max(gl.max(t, 4), 2)) - GRID_OFFSET
    passed = gl.inline_asm_elementwise(
        PASSED, "=&r,=&r,f,f,f,f", [top, k], dtype=gl.int32, is_pure=True, pack=2
    )
    return t, top, passed


@gluon.jit
def new_reference(top, k):
    """k' of all rows from each lane's largest score."""
    row_max = gl.convert_layout(gl.ceil(gl.max(top, 1)), gl.SliceLayout(1, LANES))[:, None]
    return gl.where(row_max > k + TAU, row_max, k)
