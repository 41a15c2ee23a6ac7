# SPDX-License-Identifier: Apache-2.0
"""Exact top-k as it is defined: a stable descending sort of each row, one row at a time."""

import torch


def exact_topk_reference(
    scores: torch.Tensor, k: int, *, lengths: torch.Tensor | None = None
) -> torch.Tensor:
    """See `exact_topk`. scores [T, n] fp32 -> [T, k] int32."""
    out = torch.full((scores.shape[0], k), -1, dtype=torch.int32, device=scores.device)
    for t, row in enumerate(scores):
        n = row.numel() if lengths is None else min(max(int(lengths[t]), 0), row.numel())
        values = row[:n].double()
        selectable = (values > float("-inf")).nonzero().flatten()  # neither -inf nor NaN
        order = torch.sort(values[selectable], descending=True, stable=True).indices[:k]
        chosen = selectable[order].sort().values
        out[t, : len(chosen)] = chosen.int()
    return out
