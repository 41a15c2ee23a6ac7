# SPDX-License-Identifier: Apache-2.0
"""Layouts of the gathers; the rest is the dense kernel's (decode/hopper/layouts.py)."""

from triton.experimental.gluon import language as gl

from mla_kernels.decode.hopper.layouts import PASS_64

# 16 bytes a thread. bf16 rows: 128 bytes of a row by 8 lanes, as TILE's swizzle wants them. Codes:
# 64 bytes by 4 lanes; the rope part that goes with them keeps the same rows in each thread.
GATHER_BF16 = PASS_64
GATHER_CODES = gl.constexpr(gl.BlockedLayout([1, 16], [8, 4], [4, 1], [1, 0]))
GATHER_ROPE = gl.constexpr(gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0]))
GATHER_SCALES = gl.constexpr(gl.BlockedLayout([1, 4], [8, 4], [4, 1], [1, 0]))

# A tile of e4m3 codes: 64 columns after 64 columns, as TILE has them.
CODES = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=8, rank=2))
SCALES = gl.constexpr(gl.SwizzledSharedLayout(4, 1, 1, [1, 0]))
ONE = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
SCAN_BY_WARP = gl.constexpr(gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0]))
IN_EVERY_THREAD = gl.constexpr(gl.BlockedLayout([4], [32], [4], [0]))
SCAN = gl.constexpr(gl.BlockedLayout([4], [32], [4], [0]))

# Eight partial row sums a row, [64, 8]: adding them up needs no shuffles.
SUMS = gl.constexpr(
    gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 8, 16])
)
SUMS_ROW = gl.constexpr(gl.SliceLayout(1, SUMS.value))

# O by 16 bytes a thread: the four lanes that share a row exchange their columns.
STORE = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [0, 32], [0, 64], [0, 128], [8, 0]],
        lane_bases=[[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, 256],
    )
)
