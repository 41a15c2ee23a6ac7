# SPDX-License-Identifier: Apache-2.0
"""Register and shared-memory layouts that the Hopper kernels share (one warpgroup = 4 warps)."""

from triton.experimental.gluon import language as gl

from mla_kernels.decode.hopper import support
from mla_kernels.layouts import Fp8DsMlaLayout

BLOCK = gl.constexpr(support.BLOCK)
HALF = gl.constexpr(256)  # latent columns of one PV warpgroup
ROPE = gl.constexpr(64)
# Of an fp8_ds_mla row: the first of its four fp32 scales, in fp32 columns (a TMA load starts at a
# multiple of 16 bytes, "illegal instruction" otherwise, so half a row is loaded with all four), and
# its rope part, in columns of 16 bits.
SCALE_COL = gl.constexpr(Fp8DsMlaLayout().scale_offset // 4)
DS_MLA_ROPE = gl.constexpr(Fp8DsMlaLayout().rope_offset // 2)


def _accumulator(n: int) -> gl.constexpr:
    return gl.constexpr(
        gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, n, 16])
    )


SCORES = _accumulator(64)  # S and P, [64, 64]
OUTPUT = _accumulator(256)  # one half of O, [64, 256]
QUERY = gl.constexpr(gl.DotOperandLayout(0, SCORES.value, 2))  # Q in registers

SCORES_ROW = gl.constexpr(gl.SliceLayout(1, SCORES.value))
SCORES_COL = gl.constexpr(gl.SliceLayout(0, SCORES.value))
OUTPUT_ROW = gl.constexpr(gl.SliceLayout(1, OUTPUT.value))
OUTPUT_COL = gl.constexpr(gl.SliceLayout(0, OUTPUT.value))
# What each of the four lanes that share a row of S has of it, [64, 4]: its own sum, say, so that
# nobody has to shuffle.
QUADS = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[8, 0]],
        lane_bases=[[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, 4],
    )
)

TILE = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
# The same memory as TMA fills it from the queries of one request, [1, 64, columns].
QUERY_TILE = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3))
# fp8_ds_mla: four fp32 scales a token, as a TMA load writes them and as they are read.
SCALES = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2))
SCALES_READ = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
WHOLE_SCALES = gl.constexpr(gl.BlockedLayout([8], [32], [4], [0]))  # all of a tile in each warp
# Half of an fp32 [64, 256], in the memory of a bf16 tile, as a TMA store reads it.
PARTIAL = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2))
VECTOR = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
FACTORS = gl.constexpr(gl.BlockedLayout([2], [32], [4], [0]))  # the 64 rescale factors, two a lane

# Element-wise passes over shared tiles of 64 and 128 columns, 16 bytes a thread.
PASS_64 = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
PASS_128 = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))
PASS_64_ROW = gl.constexpr(gl.SliceLayout(1, PASS_64.value))
