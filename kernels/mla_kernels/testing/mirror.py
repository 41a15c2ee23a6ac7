# SPDX-License-Identifier: Apache-2.0
"""The pow2 kernel in fp64 with its own grid and its own rounding of P.

Rounding P is by far the largest error of a decode kernel, and it hides small bugs: at 128K tokens a
mask off by one is invisible behind it. Against this reference, which rounds alike, it shows.
"""

import torch

from mla_kernels.cache.rows import rows_as_float
from mla_kernels.decode.rescale import grid_scores, scale_to_log2
from mla_kernels.numerics import GRID_OFFSET, LN2
from mla_kernels.testing.cases import DecodeCase


def mirror(case: DecodeCase) -> tuple[torch.Tensor, torch.Tensor]:
    """(out [B, s_q, H, kv_lora_rank] fp64, lse [B, s_q, H] fp64) of a causal decode, not rounded to
    q's dtype."""
    B, s_q, H, Dk = case.q.shape
    rank = case.options["kv_lora_rank"]
    scale_log2 = scale_to_log2(case.options["scale"])
    block_size = case.kv_cache.shape[1]
    out = torch.zeros(B, s_q, H, rank, dtype=torch.float64, device=case.q.device)
    lse = torch.full((B, s_q, H), -torch.inf, dtype=torch.float64, device=case.q.device)
    for b in range(B):
        length = int(case.seq_lens[b])
        pages = case.block_table[b, : -(-length // block_size)].long()
        rows = case.kv_cache[pages].flatten(0, 1)[:length]
        k = rows_as_float(rows, case.q.dtype, rank, Dk, case.options["kv_scale"]).double()
        for j in range(s_q):
            limit = max(length - s_q + 1 + j, 0)
            if limit == 0:
                continue
            # The product is fp32 in the kernels; the grid then hides in which order it was added.
            qk = (case.q[b, j].double() @ k[:limit].T).float()
            t = grid_scores(qk, scale_log2).double() - GRID_OFFSET
            top = t.amax(-1, keepdim=True).ceil()
            p = torch.exp2(t - top).to(case.q.dtype).double()
            out[b, j] = p @ k[:limit, :rank] / p.sum(-1, keepdim=True)
            lse[b, j] = (top.squeeze(-1) + p.sum(-1).log2()) * LN2
    return out, lse
