# SPDX-License-Identifier: Apache-2.0
"""Online softmax of one tile of scores with weights in e4m3.

e4m3 has 2^-9 to 448. A row's reference is moved when a score passes it by more than TAU, and then
to HEADROOM below that score, so that the weight of a row's largest score is 2^6 to 2^8: what is
2^-12 of it is still a normal number, what is 2^-15 not yet zero. References are not whole numbers
here. Rounding is coarsest just above a power of two, finest below one, and where all scores are
alike the weights should lie below: the largest becomes 2^6, most of the others less.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from mla_kernels import numerics
from mla_kernels.decode.hopper.fp8_query.operands import WEIGHTS, in_order, to_e4m3
from mla_kernels.decode.hopper.layouts import BLOCK, QUADS
from mla_kernels.decode.hopper.softmax import along_rows, by_thread, lane_maxima

TAU = gl.constexpr(numerics.TAU)
HEADROOM = gl.constexpr(6.0)

# k' of a thread's two rows, from the largest of its own scores in them and from k
# (decode/hopper/softmax.py).
MOVE_REFERENCE = gl.constexpr(f"""{{
    .reg .pred any; .reg .f32 a, b, limit_a, limit_b, other;
    mov.f32 a, $2; mov.f32 b, $3;
    add.f32 limit_a, $4, {TAU.value:.1f}; add.f32 limit_b, $5, {TAU.value:.1f};
    setp.gt.f32 any, a, limit_a; setp.gt.or.f32 any, b, limit_b, any;
    vote.sync.any.pred any, any, 0xffffffff;
    mov.f32 $0, $4; mov.f32 $1, $5;
    @!any bra DONE;
    shfl.sync.bfly.b32 other, a, 2, 0x1f, 0xffffffff; max.f32 a, a, other;
    shfl.sync.bfly.b32 other, a, 1, 0x1f, 0xffffffff; max.f32 a, a, other;
    shfl.sync.bfly.b32 other, b, 2, 0x1f, 0xffffffff; max.f32 b, b, other;
    shfl.sync.bfly.b32 other, b, 1, 0x1f, 0xffffffff; max.f32 b, b, other;
    setp.gt.f32 any, a, limit_a;
    add.f32 a, a, -{HEADROOM.value:.1f}; @any mov.f32 $0, a;
    setp.gt.f32 any, b, limit_b;
    add.f32 b, b, -{HEADROOM.value:.1f}; @any mov.f32 $1, b;
DONE: }}""")
UNPACK = gl.constexpr(
    """{
    .reg .b16 low, high, a, b, c, d; .reg .b32 x, y;
    mov.b32 {low, high}, $4;
    cvt.rn.f16x2.e4m3x2 x, low; cvt.rn.f16x2.e4m3x2 y, high;
    mov.b32 {a, b}, x; mov.b32 {c, d}, y;
    cvt.f32.f16 $0, a; cvt.f32.f16 $1, b; cvt.f32.f16 $2, c; cvt.f32.f16 $3, d;
    }"""
)

ONE_BITS = gl.constexpr(0x3F800000)  # 1.0
EACH = gl.constexpr(gl.BlockedLayout([4], [32], [4], [0]))  # all of [4] in every thread


@gluon.jit
def lowest(factor):
    """The bits of the smallest factor of each warp's rows, [4]: below ONE_BITS if one has moved.
    Positive numbers compare as their bits do, and for these there is one instruction."""
    return gl.min(gl.reshape(factor.to(gl.int32, bitcast=True), [4, 64]), 1)


@gluon.jit
def move_reference(s, k, scale_log2):
    """(scores less their rows' references, in log2 units, 2^(k - k'), k')."""
    s = by_thread(s)
    top = lane_maxima(s) * scale_log2
    k_new = gl.inline_asm_elementwise(
        MOVE_REFERENCE, "=&f,=&f,f,f,f,f", [top, k], dtype=gl.float32, is_pure=True, pack=2
    )
    x = gl.fma(s, scale_log2, -along_rows(k_new, s))
    return x, gl.exp2(k - k_new), k_new


@gluon.jit
def weights(x):
    """P as e4m3, with its tokens `in_order`."""
    p = in_order(gl.reshape(gl.exp2(x), [BLOCK, BLOCK]))
    return to_e4m3(gl.convert_layout(p, WEIGHTS))


@gluon.jit
def lane_sums(p):
    """The sums of each lane's weights of a row, [64, 4] QUADS."""
    rounded = gl.inline_asm_elementwise(
        UNPACK, "=f,=f,=f,=f,r", [p], dtype=gl.float32, is_pure=True, pack=4
    )
    sums = gl.sum(gl.sum(gl.reshape(rounded, [BLOCK, 4, 4, 4]), 3), 1)
    return gl.convert_layout(sums, QUADS)
