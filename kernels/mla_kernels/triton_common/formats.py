# SPDX-License-Identifier: Apache-2.0
"""The cache layouts by the names that kernels know them by; caches, and the scales of fp8 codes, as
kernels take them."""

import torch

_FORMATS = {torch.uint8: "fp8_ds_mla", torch.float8_e4m3fn: "fp8"}


def cache_format(dtype: torch.dtype) -> str:
    """The layout that a cache tensor of this dtype has."""
    return _FORMATS.get(dtype, "float")


def byte_view(kv_cache: torch.Tensor) -> torch.Tensor:
    """The cache as the kernels take it: an fp8 cache as bytes."""
    return kv_cache.view(torch.uint8) if kv_cache.dtype == torch.float8_e4m3fn else kv_cache


def cache_views(kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`byte_view`, and the same memory in the dtypes of an fp8_ds_mla row's scales and of its rope
    part. In other layouts, which have no such parts, a kernel reads neither."""
    if cache_format(kv_cache.dtype) == "fp8_ds_mla":
        return kv_cache, kv_cache.view(torch.float32), kv_cache.view(torch.bfloat16)
    kv = byte_view(kv_cache)
    return kv, kv, kv


def scale_argument(scale: float | torch.Tensor | None) -> float | torch.Tensor:
    """A scale of fp8 codes as a kernel takes it: a tensor that it reads, or a float. Triton gives
    an int its own type, and no parameter at all if it is 1."""
    if isinstance(scale, torch.Tensor):
        return scale
    return 1.0 if scale is None else float(scale)
