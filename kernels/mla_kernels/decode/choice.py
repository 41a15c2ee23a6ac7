# SPDX-License-Identifier: Apache-2.0
"""Which decode implementation serves a batch, and why."""

import torch

from mla_kernels.decode.triton.support import check_supported
from mla_kernels.dispatch import Choice, choose_impl
from mla_kernels.layouts import BLOCK_SIZE, MlaDims
from mla_kernels.versions import no_triton

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

    contiguous  q and kv_cache are, and start at a multiple of 16 bytes, as TMA wants them; for fp8
                caches out does too

    ValueError if `impl` is named and cannot serve it, for what no kernel takes on a GPU unless
    "torch" or "reference" is named, and for fp8 queries on a GPU whose Hopper kernel cannot:
    nothing else that is fast multiplies in fp8, so nothing stands in for it.
    """
    hopper_refusal = None
    if device.type == "cuda" and no_triton() is None:  # else that is what refuses it
        from mla_kernels.decode.hopper.support import refusal

        # Not by the number of rows: with up to 16 and an fp8 cache, too, it is faster than the
        # portable kernel. H200: 84 us to 100 for 128 requests of 4096 tokens, 34 to 37 for one of
        # 131072 (benchmarks/versions/decode_hopper_fp8.md).
        hopper_refusal = refusal(dims, dtype, kv_cache_dtype, block_size, rescale)
        if hopper_refusal is None and not contiguous:
            tensors = (
                "q and kv_cache" if kv_cache_dtype == torch.bfloat16 else "q, kv_cache and out"
            )
            hopper_refusal = f"it needs {tensors} contiguous, from a multiple of 16 bytes on"
    if dtype == torch.float8_e4m3fn:
        return _choose_for_fp8_query(impl, device, hopper_refusal)
    choice = choose_impl(
        "mla_decode", impl, device, available=AVAILABLE, hopper_refusal=hopper_refusal
    )
    if choice.impl == "triton":
        check_supported(dims, dtype)
    return choice


def _choose_for_fp8_query(impl: str, device: torch.device, hopper_refusal: str | None) -> Choice:
    if impl == "triton":
        raise ValueError(
            "impl='triton' of mla_decode cannot run here: it takes q of bfloat16 or float16, "
            "got float8_e4m3fn"
        )
    only_hopper = impl == "auto" and device.type != "cpu"
    try:
        choice = choose_impl(
            "mla_decode",
            "hopper" if only_hopper else impl,
            device,
            available=AVAILABLE,
            hopper_refusal=hopper_refusal,
        )
    except ValueError as error:
        if not only_hopper:
            raise
        raise ValueError(
            f"q of float8_e4m3fn on a GPU is for the Hopper kernel alone: {error}. "
            "Expected q of bfloat16, or impl='torch' or 'reference', which are slow"
        ) from None
    return Choice("hopper", "sm_90, fp8 queries") if only_hopper else choice
