# SPDX-License-Identifier: Apache-2.0
"""Sparse MLA attention as its definition, in fp64: softmax over the rows that the slots name."""

import torch

from mla_kernels.cache.rows import rows_as_float
from mla_kernels.torch_modes import without_modes


@without_modes
def mla_sparse_attention_reference(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    slots: torch.Tensor,
    *,
    scale: float,
    kv_lora_rank: int,
    kv_scale: float | torch.Tensor | None,
    lengths: torch.Tensor | None,
    sink: torch.Tensor | None,
    max_logits: torch.Tensor | None = None,
    deterministic: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out [T, H, kv_lora_rank] fp64, lse [T, H] fp64), token by token: always deterministic."""
    T, H, Dk = q.shape
    num_blocks, block_size = kv_cache.shape[:2]
    out = q.new_zeros(T, H, kv_lora_rank, dtype=torch.float64)
    lse = q.new_full((T, H), -torch.inf, dtype=torch.float64)
    if max_logits is not None:
        max_logits.fill_(-torch.inf)
    for t in range(T):
        limit = slots.shape[1] if lengths is None else max(int(lengths[t]), 0)
        mine = slots[t, :limit].long()
        mine = mine[(mine >= 0) & (mine < num_blocks * block_size)]
        if mine.numel() == 0:
            continue
        rows = kv_cache.view(_bytes(kv_cache))[mine // block_size, mine % block_size]
        k = rows_as_float(rows.view(kv_cache.dtype), q.dtype, kv_lora_rank, Dk, kv_scale).double()
        scores = float(scale) * (q[t].double() @ k.T)
        lse[t] = scores.logsumexp(-1)
        if max_logits is not None:
            max_logits[t] = scores.amax(-1)
        out[t] = scores.softmax(-1) @ k[:, :kv_lora_rank]
        if sink is not None:
            out[t] *= torch.sigmoid(lse[t] - sink.double())[:, None]
    return out, lse


def _bytes(kv_cache: torch.Tensor) -> torch.dtype:
    """A dtype that torch can gather: it cannot gather fp8."""
    return torch.uint8 if kv_cache.dtype == torch.float8_e4m3fn else kv_cache.dtype
