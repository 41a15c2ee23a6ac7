# SPDX-License-Identifier: Apache-2.0
"""Indexer scores as they are defined, one row at a time in fp64."""

import torch

from mla_kernels.checks import check_range
from mla_kernels.layouts import IndexerLayout
from mla_kernels.torch_modes import without_modes


def page_keys(k_cache: torch.Tensor, page: int) -> torch.Tensor:
    """Keys of one page as numbers: [64, D] fp64."""
    if k_cache.dtype == torch.bfloat16:
        return k_cache[page].double()
    layout = IndexerLayout(block_size=k_cache.shape[1], head_dim=k_cache.shape[2] - 4)
    data = k_cache[page].flatten()
    codes = data[: layout.scale_offset].view(torch.float8_e4m3fn).double()
    scales = data[layout.scale_offset :].clone().view(torch.float32).double()
    return codes.view(layout.block_size, layout.head_dim) * scales[:, None]


@without_modes
def indexer_scores_reference(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    weights: torch.Tensor,
    block_table: torch.Tensor,
    lengths: torch.Tensor,
    *,
    request_ids: torch.Tensor | None = None,
) -> torch.Tensor:
    """score[t, s] = sum over heads h of weights[t, h] * relu(q[t, h] . k[s]); [T, width] fp64."""
    T, B, block = q.shape[0], block_table.shape[0], k_cache.shape[1]
    width = block_table.shape[1] * block
    scores = torch.full((T, width), float("-inf"), dtype=torch.float64, device=q.device)
    for t in range(T):
        n = min(int(lengths[t]), width)
        request = t // (T // B) if request_ids is None else int(request_ids[t])
        if n <= 0 or request < 0:
            continue
        pages = block_table[request, : -(-n // block)].tolist()
        for page in pages:
            check_range("block_table entries", page, 0, len(k_cache) - 1)
        keys = torch.cat([page_keys(k_cache, page) for page in pages])[:n]
        dots = keys @ q[t].double().T
        scores[t, :n] = torch.relu(dots) @ weights[t].double()
    return scores
