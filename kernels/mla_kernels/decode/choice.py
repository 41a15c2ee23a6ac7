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
    num_rows: int | None = None,
) -> Choice:
    """The implementation behind `mla_decode(impl=...)` for such a batch, with the reason.

    contiguous  q and kv_cache are, and start at a multiple of 16 bytes, as TMA wants them
    num_rows    heads times new tokens of a request, the most there will be; None: many

    ValueError if `impl` is named and cannot serve it.
    """
    hopper_refusal = None
    if device.type == "cuda":
        from mla_kernels.decode.hopper.support import refusal

        hopper_refusal = refusal(dims, dtype, kv_cache_dtype, block_size, rescale)
        if hopper_refusal is None and not contiguous:
            hopper_refusal = "it needs q and kv_cache contiguous, from a multiple of 16 bytes on"
        few = num_rows is not None and num_rows <= 16 and rescale == "pow2"
        codes = kv_cache_dtype == torch.float8_e4m3fn
        if hopper_refusal is None and impl == "auto" and few and codes:
            # 128 requests of 4096 tokens: 101 us both, one of 131072: 37 against 48. With
            # fp8_ds_mla 150 against 113, 32 rows of fp8 161 against 126: benchmarks/VERSIONS.md.
            hopper_refusal = "the portable kernel is faster for up to 16 rows of an fp8 cache"
    return choose_impl(
        "mla_decode", impl, device, available=AVAILABLE, hopper_refusal=hopper_refusal
    )
