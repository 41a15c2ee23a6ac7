# SPDX-License-Identifier: Apache-2.0
"""MLA decode as its definition, in fp64: softmax(scale * q K^T) V with V = K[:, :kv_lora_rank]."""

import torch

from mla_kernels.cache.rows import rows_as_float
from mla_kernels.torch_modes import without_modes


@without_modes
def mla_decode_reference(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float,
    kv_lora_rank: int,
    kv_scale: float | torch.Tensor | None,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out [B, s_q, H, kv_lora_rank] fp64, lse [B, s_q, H] fp64)."""
    B, s_q, H, Dk = q.shape
    block_size = kv_cache.shape[1]
    out = q.new_zeros(B, s_q, H, kv_lora_rank, dtype=torch.float64)
    lse = q.new_full((B, s_q, H), -torch.inf, dtype=torch.float64)
    for b in range(B):
        length = int(seq_lens[b])
        pages = block_table[b, : (length + block_size - 1) // block_size].long()
        rows = kv_cache[pages].flatten(0, 1)[:length]
        k = rows_as_float(rows, q.dtype, kv_lora_rank, Dk, kv_scale).double()
        for j in range(s_q):
            limit = max(length - s_q + 1 + j, 0) if causal else length
            if limit == 0:
                continue
            scores = float(scale) * (q[b, j].double() @ k[:limit].T)
            out[b, j] = scores.softmax(-1) @ k[:limit, :kv_lora_rank]
            lse[b, j] = scores.logsumexp(-1)
    return out, lse
