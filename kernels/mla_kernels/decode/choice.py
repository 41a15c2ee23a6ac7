# SPDX-License-Identifier: Apache-2.0
"""Which decode implementation serves a batch, and why."""

import torch

from mla_kernels.dispatch import Choice, choose_impl
from mla_kernels.layouts import BLOCK_SIZE, MlaDims

AVAILABLE = ("hopper", "triton", "torch", "reference")


def choose_decode_impl(
    impl: str,
    device: torch.device,
    *,
    dims: MlaDims = MlaDims(),
    dtype: torch.dtype = torch.bfloat16,
    kv_cache_dtype: torch.dtype = torch.bfloat16,
    block_size: int = BLOCK_SIZE,
    rescale: str = "pow2",
    contiguous: bool = True,
) -> Choice:
    """The implementation behind `mla_decode(impl=...)` for such a batch, with the reason.

    contiguous  q and kv_cache are, and start at a multiple of 16 bytes, as TMA wants them

    ValueError if `impl` is named and cannot serve it.
    """
    # Up to 16 rows of fp8, H200: 90 us beside the portable kernel's 101 for 128 requests of 4096
    # tokens, 42 beside 39 for one of 131072 (benchmarks/VERSIONS.md).
    hopper_refusal = None
    if device.type == "cuda":
        from mla_kernels.decode.hopper.support import refusal

        hopper_refusal = refusal(dims, dtype, kv_cache_dtype, block_size, rescale)
        if hopper_refusal is None and not contiguous:
            hopper_refusal = "it needs q and kv_cache contiguous, from a multiple of 16 bytes on"
    return choose_impl(
        "mla_decode", impl, device, available=AVAILABLE, hopper_refusal=hopper_refusal
    )
