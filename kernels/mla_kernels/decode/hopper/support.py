# SPDX-License-Identifier: Apache-2.0
"""What the Hopper kernels serve. Imports no Triton, as `mla-backend plan` needs none."""

import torch

from mla_kernels.layouts import MlaDims

BLOCK = 64  # rows of a query tile, tokens of a cache tile
RESCALES = ("pow2", "amla")  # of a bf16 cache; others have pow2
FORMATS = {torch.bfloat16: "bf16", torch.float8_e4m3fn: "fp8", torch.uint8: "fp8_ds_mla"}


def refusal(
    dims: MlaDims, dtype: torch.dtype, kv_cache_dtype: torch.dtype, block_size: int, rescale: str
) -> str | None:
    """Why this kernel cannot serve such a batch; None if it can."""
    if dims != MlaDims(512, 64):
        return f"it needs kv_lora_rank 512 and rope 64, got {dims.kv_lora_rank} and {dims.rope_dim}"
    if block_size != BLOCK:
        return f"it needs blocks of {BLOCK} tokens, got {block_size}"
    if dtype == torch.float8_e4m3fn:
        return _fp8_query_refusal(kv_cache_dtype, rescale)
    if dtype != torch.bfloat16:
        return f"it needs q in bf16, got {dtype}"
    if kv_cache_dtype not in FORMATS:
        return f"it needs a cache of {list(FORMATS.values())}, got {kv_cache_dtype}"
    if kv_cache_dtype != torch.bfloat16 and rescale != "pow2":
        return f"it rescales by 'pow2' with a cache of {FORMATS[kv_cache_dtype]}, got {rescale!r}"
    if rescale not in RESCALES:
        return f"it rescales by {list(RESCALES)}, got {rescale!r}"
    return None


def _fp8_query_refusal(kv_cache_dtype: torch.dtype, rescale: str) -> str | None:
    """The same for q of float8_e4m3fn; dims and blocks are known to fit."""
    if kv_cache_dtype != torch.float8_e4m3fn:
        return f"for q of float8_e4m3fn it needs a cache of the same dtype, got {kv_cache_dtype}"
    if rescale != "pow2":
        return f"for q of float8_e4m3fn it rescales by 'pow2', got {rescale!r}"
    return None
