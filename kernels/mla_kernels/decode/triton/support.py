# SPDX-License-Identifier: Apache-2.0
"""What the portable decode kernels serve."""

import torch

from mla_kernels.layouts import MlaDims

DIMS = (MlaDims(512, 64), MlaDims(256, 64), MlaDims(512, 32), MlaDims(256, 32))


def check_supported(dims: MlaDims, dtype: torch.dtype) -> None:
    """ValueError for queries that the reference takes and these kernels do not."""
    if dims not in DIMS:
        allowed = [(d.kv_lora_rank, d.rope_dim) for d in DIMS]
        got = (dims.kv_lora_rank, dims.rope_dim)
        raise ValueError(f"Expected (kv_lora_rank, rope dim) in {allowed} for triton, got {got}")
    if dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(f"Expected q in bfloat16 or float16 for triton, got {dtype}")
