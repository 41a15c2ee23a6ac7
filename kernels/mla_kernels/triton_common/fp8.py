# SPDX-License-Identifier: Apache-2.0
"""float8_e4m3fn <-> float as Triton device functions, exact for every code.

Bytes are uint8. HARDWARE picks the conversion instructions of sm_89 and newer
(`Arch.e4m3_convert`); otherwise integer operations give the same bits. NaN encodes as 0x7F, both
NaN codes decode to NaN.
"""

import triton
import triton.language as tl


@triton.jit
def e4m3_to_f32(code, HARDWARE: tl.constexpr):
    """uint8 codes -> fp32."""
    return e4m3_to_float(code, tl.float32, HARDWARE)


@triton.jit
def e4m3_to_float(code, DTYPE: tl.constexpr, HARDWARE: tl.constexpr):
    """uint8 codes -> DTYPE; bf16 and fp16 hold every e4m3 value exactly."""
    if HARDWARE:
        return code.to(tl.float8e4nv, bitcast=True).to(DTYPE)
    # Read as fp16 bits the exponent bias is 8 too large: times 2^8, exact for subnormals too.
    # (sign-extended, so that one shift moves both; the mask clears the copies of the sign.)
    bits = code.to(tl.int8, bitcast=True).to(tl.int16) << 7
    half = (bits & -0x4080).to(tl.float16, bitcast=True)
    WIDE: tl.constexpr = tl.float16 if DTYPE.is_fp16() else tl.float32
    value = tl.where(tl.abs(half) == 1.875, float("nan"), half.to(WIDE) * 256.0)
    return value.to(DTYPE)


@triton.jit
def f32_to_e4m3(x, HARDWARE: tl.constexpr):
    """fp32 -> uint8 codes, round to nearest even, saturated to +-448."""
    if HARDWARE:
        return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    bits = x.to(tl.uint32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    clamped = tl.minimum(magnitude, 0x43E00000)  # 448.0
    # At least 2^-6: round away 20 of the 23 mantissa bits, then move the bias from 127 to 7.
    normal = ((clamped + 0x7FFFF + ((clamped >> 20) & 1)) >> 20) - (120 << 3)
    # Below: the code is |x| * 2^9 rounded, that is the 24-bit mantissa shifted right.
    mantissa = (clamped & 0x7FFFFF) | 0x800000
    shift = tl.minimum(141 - tl.minimum(clamped >> 23, 120), 31)
    half_ulp = (1 << (shift - 1)) - 1 + ((mantissa >> shift) & 1)
    subnormal = (mantissa + half_ulp) >> shift
    code = tl.where(clamped < 0x3C800000, subnormal, normal) | ((bits >> 24) & 0x80)
    return tl.where(magnitude > 0x7F800000, 0x7F, code).to(tl.uint8)
