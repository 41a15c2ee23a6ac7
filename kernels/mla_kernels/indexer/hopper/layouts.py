# SPDX-License-Identifier: Apache-2.0
"""How a page of keys and the queries lie in shared memory and registers."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from mla_kernels.triton_common.dequantize import TO_F16

PAGE = gl.constexpr(64)
D = gl.constexpr(128)
# A page is 66 lines of 128 bytes: 64 keys, then 64 fp32 scales.
LINES = gl.constexpr(66)
PAGE_BYTES = gl.constexpr(66 * 128)

# e4m3 codes, as TMA leaves them; q likewise where the codes themselves are multiplied.
KEYS = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2))
QUERY = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
SCALES = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=8, rank=2))
VECTOR = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
# Bytes of a page as the threads load them: of each of its two tokens a thread takes the 32 bytes
# d = 32 c .. 32 c + 31 (c = lane % 4).
BYTES = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [0, 8], [0, 16], [8, 0]],
        lane_bases=[[0, 32], [0, 64], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, 128],
    )
)
QUERY_LOAD = gl.constexpr(gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0]))
LIST = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))


@gluon.jit
def to_f16(codes):
    """e4m3 bytes -> fp16, exactly."""
    return gl.inline_asm_elementwise(
        TO_F16, "=r,=r,r", [codes], dtype=gl.float16, is_pure=True, pack=4
    )


@gluon.jit
def operand(codes, FP8: gl.constexpr):
    """[N, 128] e4m3 bytes as the products take them. fp16: with the columns in the order that suits
    BYTES: a thread's own bytes become its columns of the wgmma operand."""
    if FP8:
        return codes.to(gl.float8e4nv, bitcast=True)
    else:
        x = gl.reshape(to_f16(codes), [codes.shape[0], 4, 8, 2, 2])
        return gl.reshape(gl.permute(x, [0, 2, 3, 1, 4]), codes.shape)
