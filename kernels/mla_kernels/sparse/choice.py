# SPDX-License-Identifier: Apache-2.0
"""Which sparse attention implementation serves a batch, and why."""

import torch

from mla_kernels.dispatch import Choice, choose_impl
from mla_kernels.layouts import MlaDims

AVAILABLE = ("hopper", "triton", "torch", "reference")
# (kv_lora_rank, Dk) that the portable kernel takes, in bf16 and fp16; "auto" takes torch for all
# else.
TRITON_DIMS = ((512, 576), (256, 288))


def choose_sparse_impl(
    impl: str,
    device: torch.device,
    *,
    dims: MlaDims = MlaDims(),
    dtype: torch.dtype = torch.bfloat16,
    kv_cache_dtype: torch.dtype = torch.bfloat16,
    contiguous: bool = True,
    aligned: bool = True,
    max_logits: bool = False,
    few: bool = False,
) -> Choice:
    """The implementation behind `mla_sparse_attention(impl=...)` for such a batch, with the reason.

    contiguous  q is
    aligned     every cache row starts at a multiple of 16 bytes
    max_logits  they are asked for
    few         one token of at most 16 heads, which the portable kernel does faster (H200, cold L2,
                fp8_ds_mla: 12.7 us to 14.7 with 16 heads, 11.9 to 13.8 with 8): for "auto"

    ValueError if `impl` is named and cannot serve it.
    """
    hopper_refusal = None
    available: tuple[str, ...] = AVAILABLE
    if device.type == "cuda":
        from mla_kernels.sparse.hopper.support import refusal

        hopper_refusal = refusal(dims, dtype, kv_cache_dtype, contiguous, aligned, max_logits)
    if impl == "auto" and few:
        available = tuple(name for name in available if name != "hopper")
    if impl == "auto" and (
        dtype == torch.float32 or (dims.kv_lora_rank, dims.head_dim) not in TRITON_DIMS
    ):
        available = tuple(name for name in available if name != "triton")
    return choose_impl(
        "mla_sparse_attention", impl, device, available=available, hopper_refusal=hopper_refusal
    )
