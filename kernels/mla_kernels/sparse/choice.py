# SPDX-License-Identifier: Apache-2.0
"""Which sparse attention implementation serves a batch, and why."""

import torch

from mla_kernels import checks
from mla_kernels.decode.triton.support import DIMS
from mla_kernels.dispatch import Choice, choose_impl
from mla_kernels.layouts import MlaDims
from mla_kernels.versions import no_triton

AVAILABLE = ("hopper", "triton", "torch", "reference")
RESCALES = ("pow2", "flash")


def is_few(tokens: int | None, heads: int, kv_cache_dtype: torch.dtype) -> bool:
    """Whether the portable kernel does a batch faster than Hopper's, which pads heads to 64 rows.

    tokens  None: any number of them, as in the steps of an engine, which settles for one kernel

    Measured on an H200 with a cold L2, portable to Hopper: fp8_ds_mla with 16 heads 73.1 to 93.6 us
    for 128 tokens, 29.0 to 35.4 for 32, 10.3 to 14.1 for one, which with 32 heads takes 10.8 to
    15.1; 1799 to 2588 us for 4096 tokens of a prompt; else one token of at most 16 heads.
    """
    if kv_cache_dtype == torch.uint8:
        return heads <= 16 or (tokens == 1 and heads <= 32)
    return tokens == 1 and heads <= 16


def choose_sparse_impl(
    impl: str,
    device: torch.device,
    *,
    dims: MlaDims = MlaDims(),
    dtype: torch.dtype = torch.bfloat16,
    kv_cache_dtype: torch.dtype = torch.bfloat16,
    contiguous: bool = True,
    aligned: bool = True,
    few: bool = False,
    rescale: str = "pow2",
) -> Choice:
    """The implementation behind `mla_sparse_attention(impl=...)` for such a batch, with the reason.

    contiguous  q is
    aligned     every cache row starts at a multiple of 16 bytes
    few         so few rows that the portable kernel is faster (`is_few`): "auto" takes no other
    rescale     "flash" is torch's own operator, and that of a CPU

    ValueError if `impl` is named and cannot serve it, or for a rescale that nothing here has.
    """
    checks.check_choice("rescale", rescale, RESCALES)
    hopper_refusal = None
    available: tuple[str, ...] = AVAILABLE
    if rescale == "flash":
        if device.type != "cpu" or impl in ("hopper", "triton"):
            raise ValueError(
                f"Expected rescale 'pow2' with impl {impl!r} on {device.type}, got 'flash', which "
                "is for torch on a CPU"
            )
        available = ("torch", "reference")
    if device.type == "cuda" and no_triton() is None:  # else that is what refuses it
        from mla_kernels.sparse.hopper.support import refusal

        hopper_refusal = refusal(dims, dtype, kv_cache_dtype, contiguous, aligned)
    if impl == "auto" and few and hopper_refusal is None:
        hopper_refusal = "the portable kernel is faster for so few heads or tokens"
    if impl == "auto" and (dtype == torch.float32 or dims not in DIMS):  # torch serves all
        available = tuple(name for name in available if name != "triton")
    return choose_impl(
        "mla_sparse_attention", impl, device, available=available, hopper_refusal=hopper_refusal
    )
