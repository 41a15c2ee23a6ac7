# SPDX-License-Identifier: Apache-2.0
"""Into how many parts a plan for the Hopper kernels cuts a step."""

import torch
import triton

from mla_kernels.decode.hopper import layouts
from mla_kernels.decode.hopper.fp8.configs import choose_config
from mla_kernels.decode.hopper.support import FORMATS
from mla_kernels.decode.plan.launcher import SPARE


def parts_and_spare(
    rows: int, device: torch.device, kv_cache_dtype: torch.dtype, dtype: torch.dtype
) -> tuple[int, int]:
    """Into how many parts a plan cuts a step, and their spare (decode/plan/launcher.py)."""
    return parts_for(rows, device, kv_cache_dtype, dtype), spare_for(rows, kv_cache_dtype)


def parts_for(
    rows: int, device: torch.device, kv_cache_dtype: torch.dtype, dtype: torch.dtype
) -> int:
    """Parts for which parts x row tiles fill the device, one CTA an SM."""
    tile = layouts.BLOCK.value
    if dtype != torch.float8_e4m3fn and kv_cache_dtype != torch.bfloat16:
        tile = choose_config(rows, FORMATS[kv_cache_dtype])["N"]
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    return max(1, sms // triton.cdiv(rows, tile))


def spare_for(rows: int, kv_cache_dtype: torch.dtype) -> int:
    """A part may do 1 / spare_for more work to save cuts; 0: none.

    Where memory is the limit, a few idle SMs cost nothing: 128 requests of any length then have one
    of 132 SMs each (benchmarks/versions/decode_hopper.md, rows 57 and 58).
    """
    return SPARE if rows <= 32 and kv_cache_dtype == torch.bfloat16 else 0
