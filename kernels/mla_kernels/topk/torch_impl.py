# SPDX-License-Identifier: Apache-2.0
"""Exact top-k in torch: the k-th value of each row by `torch.topk`, ties by a running count.

No host synchronisation, so it also runs under CUDA graphs.
"""

import torch

# Scores taken at a time: what is made of them takes eight times their memory, which a prompt over a
# long context may not have. Fewer stay in a CPU's cache, too.
MAX_ELEMENTS = 2**20


def exact_topk_torch(
    scores: torch.Tensor, k: int, *, lengths: torch.Tensor | None = None
) -> torch.Tensor:
    """See `exact_topk`. scores [T, n] fp32 -> [T, k] int32."""
    T, n = scores.shape
    out = torch.full((T, k), -1, dtype=torch.int32, device=scores.device)
    if n == 0:
        return out
    rows = max(MAX_ELEMENTS // n, 1)
    for part in (slice(t, t + rows) for t in range(0, T, rows)):
        _choose(scores[part], k, None if lengths is None else lengths[part], out[part])
    return out


def _choose(scores: torch.Tensor, k: int, lengths: torch.Tensor | None, out: torch.Tensor) -> None:
    """Write out [T, k]."""
    T, n = scores.shape
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
    found = torch.full((T, k + 1), -1, dtype=torch.int32, device=scores.device)
    out.copy_(found.scatter_(1, position, columns.expand(T, n))[:, :k])
