# SPDX-License-Identifier: Apache-2.0
"""e4m3 bytes of a cache tile -> the dtype of the dots.

For mma (not wgmma) the conversion is assembly marked as impure, which Triton does not move. It
would move a plain cast behind the change to the dot's layout: one 8-bit shared load for each
element of V, every element converted twice (as K and as V), and no asynchronous copies. For wgmma
the operand lies in shared memory anyway and the plain cast schedules better.
"""

import triton
import triton.language as tl

from mla_kernels.triton_common.fp8 import e4m3_to_f32, e4m3_to_float
from mla_kernels.triton_common.rounding import round_to

# Four bytes in one register -> two registers of fp16 pairs.
TO_F16 = tl.constexpr(
    """{
    .reg .b16 lo, hi;
    mov.b32 {lo, hi}, $2;
    cvt.rn.f16x2.e4m3x2 $0, lo;
    cvt.rn.f16x2.e4m3x2 $1, hi;
    }"""
)

_SCALED = """{
    .reg .b16 lo, hi, h0, h1, h2, h3;
    .reg .b32 a, b;
    .reg .f32 f0, f1, f2, f3;
    mov.b32 {lo, hi}, $2;
    cvt.rn.f16x2.e4m3x2 a, lo;
    cvt.rn.f16x2.e4m3x2 b, hi;
    mov.b32 {h0, h1}, a;
    mov.b32 {h2, h3}, b;
    cvt.f32.f16 f0, h0;
    cvt.f32.f16 f1, h1;
    cvt.f32.f16 f2, h2;
    cvt.f32.f16 f3, h3;
    mul.f32 f0, f0, $3;
    mul.f32 f1, f1, $4;
    mul.f32 f2, f2, $5;
    mul.f32 f3, f3, $6;
    cvt.rn.OUT.f32 $0, f1, f0;
    cvt.rn.OUT.f32 $1, f3, f2;
    }"""
SCALED_BF16 = tl.constexpr(_SCALED.replace("OUT", "bf16x2"))
SCALED_REGS = tl.constexpr("=r,=r,r,r,r,r,r")
SCALED_F16 = tl.constexpr(_SCALED.replace("OUT", "f16x2"))


@triton.jit
def e4m3_to_f16(code, HARDWARE: tl.constexpr):
    """uint8 codes -> fp16, exactly: it holds every e4m3 value."""
    if HARDWARE:
        return tl.inline_asm_elementwise(
            TO_F16, "=r,=r,r", [code], dtype=tl.float16, is_pure=False, pack=4
        )
    else:
        return e4m3_to_float(code, tl.float16, HARDWARE)


@triton.jit
def scaled_e4m3(code, scale, DTYPE: tl.constexpr, HARDWARE: tl.constexpr, PIN: tl.constexpr):
    """uint8 codes times fp32 scales of the same shape, rounded once to DTYPE; PIN: in assembly."""
    if HARDWARE and PIN:
        if DTYPE == tl.bfloat16:
            return tl.inline_asm_elementwise(
                SCALED_BF16, SCALED_REGS, [code, scale], dtype=tl.bfloat16, is_pure=False, pack=4
            )
        else:
            return tl.inline_asm_elementwise(
                SCALED_F16, SCALED_REGS, [code, scale], dtype=tl.float16, is_pure=False, pack=4
            )
    return round_to(e4m3_to_f32(code, HARDWARE) * scale, DTYPE)
