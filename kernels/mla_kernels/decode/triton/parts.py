# SPDX-License-Identifier: Apache-2.0
"""Into how many parts a plan for the portable kernels cuts a step."""

import torch
import triton

from mla_kernels.arch import arch_of
from mla_kernels.decode.triton.tiles import ctas_per_sm, tile_rows
from mla_kernels.triton_common.formats import cache_format


def parts_and_spare(
    rows: int, device: torch.device, kv_cache_dtype: torch.dtype, dtype: torch.dtype
) -> tuple[int, int]:
    """Into how many parts a plan for the portable kernels cuts a step, and their spare: none,
    whatever the queries' dtype. Those of the Hopper kernels: decode/hopper/parts.py."""
    return parts_for(rows, device, kv_cache_dtype), 0


def parts_for(rows: int, device: torch.device, kv_cache_dtype: torch.dtype = torch.bfloat16) -> int:
    """Parts for which the portable kernel's programs, parts x row tiles, fill the device."""
    ctas = ctas_per_sm(rows, arch_of(device), cache_format(kv_cache_dtype))
    sms = (
        4
        if device.type == "cpu"
        else torch.cuda.get_device_properties(device).multi_processor_count
    )
    return max(1, sms * ctas // row_tiles(rows, device))


def row_tiles(rows: int, device: torch.device) -> int:
    """Programs that share one part."""
    return triton.cdiv(rows, tile_rows(rows, arch_of(device)))
