# SPDX-License-Identifier: Apache-2.0
"""Rounding fp32 to a narrower float type alike on a GPU and in Triton's interpreter."""

import triton
import triton.language as tl

from mla_kernels.triton_common.runtime import INTERPRET as _INTERPRET

INTERPRET = tl.constexpr(_INTERPRET)


@triton.jit
def round_to(x, DTYPE: tl.constexpr):
    """fp32 -> DTYPE, round to nearest even. The interpreter's own conversion to bf16 truncates."""
    if INTERPRET and DTYPE.is_bf16():
        bits = x.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        rounded = tl.where(x == x, rounded, 0x7FC0)
        return rounded.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return x.to(DTYPE)
