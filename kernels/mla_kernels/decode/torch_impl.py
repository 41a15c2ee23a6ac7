# SPDX-License-Identifier: Apache-2.0
"""MLA decode in torch: batched over requests, one pass over the cache in chunks of tokens."""

import torch

from mla_kernels.cache.rows import rows_as_float
from mla_kernels.numerics import EXPONENT_FLOOR, GRID_OFFSET, LN2, LOG2E, TAU

CHUNK = 1024  # tokens gathered at a time


def mla_decode_torch(
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
    """(out [B, s_q, H, kv_lora_rank] fp32, lse [B, s_q, H] fp32), rescale "pow2"."""
    B, s_q, H, Dk = q.shape
    num_blocks, block_size = kv_cache.shape[:2]
    width = block_table.shape[1]
    if not seq_lens.is_cuda and B:
        width = min(width, -(-int(seq_lens.max()) // block_size))
    step = max(CHUNK // block_size, 1)
    scale_log2 = torch.tensor(scale * LOG2E, dtype=torch.float32).item()
    queries = q.reshape(B, s_q * H, Dk).float()
    limit = seq_lens.long()[:, None].expand(B, s_q)
    if causal:
        limit = limit - s_q + 1 + torch.arange(s_q, device=q.device)
    limit = limit.repeat_interleave(H, dim=1)[..., None]
    k = q.new_full((B, s_q * H, 1), EXPONENT_FLOOR, dtype=torch.float32)
    total = torch.zeros_like(k)
    acc = q.new_zeros(B, s_q * H, kv_lora_rank, dtype=torch.float32)
    for first in range(0, width, step):
        pages = block_table[:, first : min(first + step, width)].long().clamp(0, num_blocks - 1)
        rows = kv_cache[pages].flatten(1, 2)
        token = first * block_size + torch.arange(rows.shape[1], device=q.device)
        keys = rows_as_float(rows, q.dtype, kv_lora_rank, Dk, kv_scale).float()
        keys.masked_fill_((token >= seq_lens[:, None])[..., None], 0)
        t = torch.bmm(queries, keys.mT).double().mul_(scale_log2).add_(GRID_OFFSET).float()
        t.masked_fill_(token >= limit, -torch.inf)
        row_max = (t.amax(-1, keepdim=True) - GRID_OFFSET).ceil().clamp(min=EXPONENT_FLOOR)
        k_new = torch.where(row_max > k + TAU, row_max, k)
        factor = torch.exp2((k - k_new).clamp(min=-127)) * (k - k_new >= -126)
        p = torch.exp2(t - (GRID_OFFSET + k_new)).to(q.dtype).float()
        total = total * factor + p.sum(-1, keepdim=True)
        acc = acc * factor + torch.bmm(p, keys[..., :kv_lora_rank])
        k = k_new
    seen = total > 0
    out = torch.where(seen, acc / total, 0.0)
    lse = torch.where(seen, (k + total.log2()) * LN2, -torch.inf)
    return out.view(B, s_q, H, kv_lora_rank), lse.view(B, s_q, H)
