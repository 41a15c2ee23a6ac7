# SPDX-License-Identifier: Apache-2.0
"""Codes times scale / M (decode/hopper/scales.py), and numbers that warpgroups tell each other."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from mla_kernels.sparse.hopper.layouts import ONE

TIMES_RATIO = gl.constexpr(
    """{
    .reg .b16 lo, hi;
    .reg .b32 a, b;
    mov.b32 {lo, hi}, $2;
    cvt.rn.f16x2.e4m3x2 a, lo;
    cvt.rn.f16x2.e4m3x2 b, hi;
    mul.rn.f16x2 $0, a, $3;
    mul.rn.f16x2 $1, b, $3;
    }"""
)


@gluon.jit
def twice_f16(x):
    """fp32 -> fp16 in both halves of an int32."""
    return gl.inline_asm_elementwise(
        "cvt.rn.f16x2.f32 $0, $1, $1;", "=r,r", [x], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def times_ratio(codes, ratio):
    """uint8 codes times factors of `twice_f16`, one for a row."""
    codes, ratio = gl.broadcast(codes, ratio)
    return gl.inline_asm_elementwise(
        TIMES_RATIO, "=r,=r,r,r,r,r,r", [codes, ratio], dtype=gl.float16, is_pure=True, pack=4
    )


@gluon.jit
def store_scalar(place, x):
    place.store(gl.full([1], 0, x.dtype, ONE) + x)


@gluon.jit
def load_scalar(place):
    return gl.max(place.load(ONE), 0)
