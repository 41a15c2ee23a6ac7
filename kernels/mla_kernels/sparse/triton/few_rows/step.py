# SPDX-License-Identifier: Apache-2.0
"""One tile of fp8_ds_mla rows against the heads of a program, as Gluon device functions.

The dense kernel's step (decode/triton/few_rows/kernel.py says who does what and how a token's four
scales enter). What differs saves registers and instructions: 128 a thread have to do here although
every row has an address of its own. What a token's scales become is computed once and passed
through shared memory, not by every warp for itself, and row sums are added within a thread first.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from mla_kernels import numerics
from mla_kernels.decode.triton.few_rows.operands import (
    KEYS_TO_F16,
    LEAST_SCALE,
    VALUES_TO_F16,
    codes_to_f16,
)
from mla_kernels.decode.triton.few_rows.results import per_row
from mla_kernels.decode.triton.softmax import integer_reference, pow2_int
from mla_kernels.triton_common.gluon_compat import aggregate

GRID_OFFSET = gl.constexpr(numerics.GRID_OFFSET)
TAU = gl.constexpr(numerics.TAU)


@gluon.constexpr_function
def mma_layout(GROUPS, WARPS):
    """Both products of the latent: a warp owns a group of its columns."""
    return gl.NVMMADistributedLayout([2, 0], [GROUPS, 1, WARPS // GROUPS], [1, 16, 8])


@gluon.constexpr_function
def partial_layout(GROUPS, BN, WARPS):
    """Partial scores as the softmax reads them: whole rows within a warp."""
    return gl.BlockedLayout([GROUPS, 1, 4], [1, 128 // BN, BN // 4], [1, WARPS, 1], [2, 1, 0])


@gluon.constexpr_function
def swizzled(WIDTH):
    """Shared rows of WIDTH 16-bit units, so that 8 rows of 16 bytes meet no bank twice."""
    phase = max(1, 64 // WIDTH)
    return gl.SwizzledSharedLayout(8, phase, 8 // phase, [1, 0])


@aggregate
class Scratch:
    """Shared memory of a step.

    q_rope          [1, BM, DR], the query's rope part
    partial, rope   [groups, BM, BN] and [BM, BN] fp32: scores of each group and of the rope part
    p, factor       [BM, BN] fp16 weights and [BM] fp32, what O is multiplied by
    of each token, whose largest scale is m:
    scale           [groups, BN] fp32, a group's scale times `up`
    ratio           [groups, BN] fp16, a group's scale / m
    inverse, log    [BN] fp32, 1 / m and log2 m
    """

    q_rope: gl.shared_memory_descriptor
    partial: gl.shared_memory_descriptor
    rope: gl.shared_memory_descriptor
    p: gl.shared_memory_descriptor
    factor: gl.shared_memory_descriptor
    scale: gl.shared_memory_descriptor
    ratio: gl.shared_memory_descriptor
    inverse: gl.shared_memory_descriptor
    log: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, q_rope, partial, rope, p, factor, scale, ratio, inverse, log):
        self.q_rope = q_rope
        self.partial = partial
        self.rope = rope
        self.p = p
        self.factor = factor
        self.scale = scale
        self.ratio = ratio
        self.inverse = inverse
        self.log = log


@gluon.jit
def allocate_scratch(
    GROUPS: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, DR: gl.constexpr,
    ROPE_DTYPE: gl.constexpr,
):  # fmt: skip
    """Scratch for tiles of BN rows."""
    SUMS: gl.constexpr = gl.SwizzledSharedLayout(8, 1, min(8, BN // 8), [2, 1, 0])
    ROPE_SUMS: gl.constexpr = gl.SwizzledSharedLayout(8, 1, min(8, BN // 8), [1, 0])
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    VECTOR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    # Padded, not swizzled: a thread's places are then one address and constants.
    Q_ROPE: gl.constexpr = gl.PaddedSharedLayout.with_identity_for([[DR, 8]], [BM, DR], [1, 0])
    return Scratch(
        gl.allocate_shared_memory(ROPE_DTYPE, [1, BM, DR], Q_ROPE),
        gl.allocate_shared_memory(gl.float32, [GROUPS, BM, BN], SUMS),
        gl.allocate_shared_memory(gl.float32, [BM, BN], ROPE_SUMS),
        gl.allocate_shared_memory(gl.float16, [BM, BN], swizzled(BN)),
        gl.allocate_shared_memory(gl.float32, [BM], VECTOR),
        gl.allocate_shared_memory(gl.float32, [GROUPS, BN], PLAIN),
        gl.allocate_shared_memory(gl.float16, [GROUPS, BN], PLAIN),
        gl.allocate_shared_memory(gl.float32, [BN], VECTOR),
        gl.allocate_shared_memory(gl.float32, [BN], VECTOR),
    )


@gluon.jit
def sum_in_threads(x):
    """[BM, BN] weights -> [BM, BN // 4] sums, each of what one thread has."""
    return gl.sum(gl.reshape(x, [x.shape[0], x.shape[1] // 4, 4]), 2)


@gluon.jit
def prepare_scales(scratch, scales, up, WARPS: gl.constexpr):
    """What a tile's scales [BN, groups] say of each token."""
    TOKEN: gl.constexpr = gl.BlockedLayout([1, scales.shape[1]], [32, 1], [WARPS, 1], [1, 0])
    scale = scales.load(TOKEN)
    most = gl.maximum(gl.max(gl.abs(scale), 1), LEAST_SCALE)
    inverse = 1.0 / most
    scratch.inverse.store(inverse)
    scratch.log.store(gl.log2(most))
    scratch.scale.permute((1, 0)).store(scale * up)
    scratch.ratio.permute((1, 0)).store((scale * inverse[:, None]).to(gl.float16))


@gluon.jit
def store_scores(scratch, q_a, q_b, latent, rope, WARPS: gl.constexpr):
    """The scores of a tile, in parts, to scratch."""
    GROUPS: gl.constexpr = scratch.partial.shape[0]
    BM: gl.constexpr = scratch.partial.shape[1]
    BN: gl.constexpr = scratch.partial.shape[2]
    MMA: gl.constexpr = mma_layout(GROUPS, WARPS)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    ROPE_MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, WARPS], [16, 8])
    ROPE_LEFT: gl.constexpr = gl.DotOperandLayout(0, ROPE_MMA, 2)
    ROPE_RIGHT: gl.constexpr = gl.DotOperandLayout(1, ROPE_MMA, 2)
    keys_a, keys_b = codes_to_f16(latent.permute((0, 2, 1)).load(RIGHT), KEYS_TO_F16)
    qk = gl.full([GROUPS, BM, BN], 0.0, gl.float32, MMA)
    qk = mma_v2(q_a, keys_a, qk)
    qk = mma_v2(q_b, keys_b, qk)
    scratch.partial.store(qk)
    keys = rope.permute((1, 0)).load(ROPE_RIGHT).to(scratch.q_rope.dtype)
    qk = gl.full([BM, BN], 0.0, gl.float32, ROPE_MMA)
    scratch.rope.store(mma_v2(scratch.q_rope.index(0).load(ROPE_LEFT), keys, qk))


@gluon.jit
def load_scores(scratch, WARPS: gl.constexpr):
    """[BM, BN]: the sum of what store_scores left."""
    PARTIAL: gl.constexpr = partial_layout(scratch.partial.shape[0], scratch.p.shape[1], WARPS)
    scale = scratch.scale.load(gl.SliceLayout(1, PARTIAL))
    partial = scratch.partial.load(PARTIAL) * gl.expand_dims(scale, 1)
    return gl.sum(partial, 0) + scratch.rope.load(gl.SliceLayout(0, PARTIAL))


@gluon.jit
def softmax(scratch, qk, grid, row_scale, k, weight):
    """(k, weight) after a tile, whose weights go to scratch. grid [BN]: GRID_OFFSET, or -inf where
    there is no row."""
    SCORES: gl.constexpr = qk.type.layout
    TOKEN: gl.constexpr = gl.SliceLayout(0, SCORES)
    ones = gl.full(qk.shape, 1.0, gl.float32, SCORES)
    offset = grid.load(TOKEN) + scratch.log.load(TOKEN)
    t = gl.fma(qk, ones * row_scale, ones * offset[None, :])
    t_max = integer_reference(gl.max(t, 1))
    k_new = gl.where(t_max > k + TAU, t_max, k)
    factor = pow2_int(k - k_new)
    p = gl.exp2(t - (k_new + GRID_OFFSET)[:, None])
    SUM_ROW: gl.constexpr = gl.SliceLayout(1, weight.type.layout)
    weight = weight * gl.convert_layout(factor, SUM_ROW, assert_trivial=True)[:, None]
    weight += sum_in_threads(p * scratch.inverse.load(TOKEN)[None, :])
    scratch.factor.store(factor)
    scratch.p.store(p.to(gl.float16))
    return k_new, weight


@gluon.jit
def add_values(scratch, latent, o_a, o_b, WARPS: gl.constexpr):
    """(o_a, o_b) after the tile whose weights are in scratch."""
    GROUPS: gl.constexpr = scratch.partial.shape[0]
    MMA: gl.constexpr = mma_layout(GROUPS, WARPS)
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    factor = per_row(scratch.factor.load(gl.SliceLayout(0, gl.SliceLayout(2, MMA))))
    p = gl.expand_dims(scratch.p.load(gl.SliceLayout(0, LEFT)), 0)
    p, _ = gl.broadcast(p, gl.full([GROUPS, 1, 1], 0.0, gl.float16, LEFT))
    p = p * gl.expand_dims(scratch.ratio.load(gl.SliceLayout(1, LEFT)), 1)
    values_a, values_b = codes_to_f16(latent.load(RIGHT), VALUES_TO_F16)
    return mma_v2(p, values_a, o_a * factor), mma_v2(p, values_b, o_b * factor)
