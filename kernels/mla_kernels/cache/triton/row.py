# SPDX-License-Identifier: Apache-2.0
"""Writing one cache row in any layout, as a Triton device function."""

import triton
import triton.language as tl

from mla_kernels import layouts
from mla_kernels.triton_common.fp8 import f32_to_e4m3
from mla_kernels.triton_common.rounding import round_to

E4M3_MAX = tl.constexpr(layouts.E4M3_MAX)
MIN_GROUP_SCALE = tl.constexpr(layouts.MIN_GROUP_SCALE)


@triton.jit
def store_row(
    latent,  # [BLOCK_DV] fp32
    rope,  # [BLOCK_DR] fp32
    row_ptr,  # first element of the row
    kv_scale,  # fp32, used by "fp8": value = e4m3 * kv_scale
    DV: tl.constexpr,
    DR: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_DR: tl.constexpr,
    FORMAT: tl.constexpr,  # "float", "fp8", "fp8_ds_mla"; the last two through uint8 pointers
    GROUP: tl.constexpr,
    SCALE_OFFSET: tl.constexpr,
    ROPE_OFFSET: tl.constexpr,
    HW_FP8: tl.constexpr,
):
    dv = tl.arange(0, BLOCK_DV)
    dr = tl.arange(0, BLOCK_DR)
    if FORMAT == "float":
        dtype: tl.constexpr = row_ptr.dtype.element_ty
        tl.store(row_ptr + dv, round_to(latent, dtype), mask=dv < DV)
        tl.store(row_ptr + DV + dr, round_to(rope, dtype), mask=dr < DR)
    elif FORMAT == "fp8":
        # div_rn: the plain division of the GPU is 2 ulp off, which can move a rounding.
        latent = f32_to_e4m3(tl.math.div_rn(latent, kv_scale), HW_FP8)
        rope = f32_to_e4m3(tl.math.div_rn(rope, kv_scale), HW_FP8)
        tl.store(row_ptr + dv, latent, mask=dv < DV)
        tl.store(row_ptr + DV + dr, rope, mask=dr < DR)
    else:
        GROUPS: tl.constexpr = BLOCK_DV // GROUP
        groups = tl.reshape(latent, [GROUPS, GROUP])
        scale = tl.math.div_rn(tl.max(tl.abs(groups), 1), E4M3_MAX)
        scale = tl.maximum(scale, MIN_GROUP_SCALE)
        codes = f32_to_e4m3(tl.math.div_rn(groups, scale[:, None]), HW_FP8)
        tl.store(row_ptr + dv, tl.reshape(codes, [BLOCK_DV]), mask=dv < DV)
        scale_ptr = (row_ptr + SCALE_OFFSET).to(tl.pointer_type(tl.float32), bitcast=True)
        g = tl.arange(0, GROUPS)
        tl.store(scale_ptr + g, scale, mask=g < DV // GROUP)
        rope_ptr = (row_ptr + ROPE_OFFSET).to(tl.pointer_type(tl.bfloat16), bitcast=True)
        tl.store(rope_ptr + dr, round_to(rope, tl.bfloat16), mask=dr < DR)
