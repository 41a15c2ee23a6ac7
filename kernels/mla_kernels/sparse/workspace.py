# SPDX-License-Identifier: Apache-2.0
"""Scratch that calls of `mla_sparse_attention` share."""

import torch

from mla_kernels import checks
from mla_kernels.dispatch import choose_impl
from mla_kernels.sparse import choice
from mla_kernels.sparse.api import MAX_HEADS


def mla_sparse_workspace(
    num_tokens: int,
    num_heads: int,
    num_slots: int,
    *,
    device: torch.device,
    kv_lora_rank: int = 512,
    impl: str = "auto",
) -> torch.Tensor:
    """Scratch for `mla_sparse_attention`: one [bytes] uint8 tensor that layers and steps share.

    It serves every call on the device with up to num_tokens tokens of num_heads heads and num_slots
    slots, in any cache format; a call with fewer slots may be cut otherwise and need more. Empty
    where the implementation needs none.
    """
    checks.check_range("num_tokens", num_tokens, 0, 2**31 - 1)
    checks.check_range("num_heads", num_heads, 1, MAX_HEADS)
    checks.check_range("num_slots", num_slots, 0, checks.MAX_SLOTS)
    checks.check_range("kv_lora_rank", kv_lora_rank, 1, 2**15)
    checks.check_type("device", device, torch.device)
    size = 0
    chosen = choose_impl("mla_sparse_attention", impl, device, available=choice.AVAILABLE).impl
    if chosen == "hopper":
        from mla_kernels.sparse.hopper.support import largest_workspace as largest

        size = largest(num_tokens, num_heads, num_slots, device)
    # With "auto" the portable kernel takes what the Hopper kernel refuses.
    if chosen == "triton" or (impl == "auto" and chosen == "hopper"):
        from mla_kernels.sparse.triton.tiles import largest_workspace

        portable = largest_workspace(num_tokens, num_heads, num_slots, kv_lora_rank, device)
        size = max(size, portable)
    return torch.empty(size, dtype=torch.uint8, device=device)
