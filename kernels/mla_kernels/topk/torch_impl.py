# SPDX-License-Identifier: Apache-2.0
"""Exact top-k in torch: the k-th value of each row by `torch.topk`, ties by a running count.

No host synchronisation, so it also runs under CUDA graphs.
"""

import torch


def exact_topk_torch(
    scores: torch.Tensor, k: int, *, lengths: torch.Tensor | None = None
) -> torch.Tensor:
    """See `exact_topk`. scores [T, n] fp32 -> [T, k] int32."""
    T, n = scores.shape
    out = torch.full((T, k + 1), -1, dtype=torch.int32, device=scores.device)
    if T == 0 or n == 0:
        return out[:, :k].contiguous()
    columns = torch.arange(n, dtype=torch.int32, device=scores.device)
    selectable = scores > float("-inf")
    if lengths is not None:
        selectable &= columns < lengths[:, None]
    values = torch.where(selectable, scores, float("-inf"))
    # Only the k-th value is used: which of several equal ones torch.topk returns does not matter.
    threshold = torch.topk(values, min(k, n), dim=1, sorted=False).values.amin(dim=1, keepdim=True)
    above = values > threshold
    equal = selectable & (values == threshold)
    ties = k - above.sum(dim=1, keepdim=True)
    chosen = above | (equal & (equal.cumsum(dim=1) <= ties))
    # The chosen columns move to the front in ascending order; the others go to a spare column.
    position = torch.where(chosen, chosen.cumsum(dim=1) - 1, k)
    return out.scatter_(1, position, columns.expand(T, n))[:, :k].contiguous()
