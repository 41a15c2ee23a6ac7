# SPDX-License-Identifier: Apache-2.0
"""The largest scaled score of each row, which FlashMLA's prefill returns beside the log-sum-exp."""

import torch

ROWS_AT_ONCE = 2**14


def sparse_max_logits(
    q: torch.Tensor,
    rows: torch.Tensor,
    slots: torch.Tensor,
    *,
    scale: float,
    lengths: torch.Tensor | None = None,
) -> torch.Tensor:
    """max of scale * q . k over each token's rows, -inf without any.

    q [T, H, Dk], rows [s_kv, Dk] and slots [T, K] (-1 = none) -> [T, H] fp32.
    """
    T, H, _ = q.shape
    K = slots.shape[1]
    used = slots >= 0
    if lengths is not None:
        used &= torch.arange(K, device=q.device) < lengths[:, None]
    out = q.new_full((T, H), -torch.inf, dtype=torch.float32)
    step = max(1, ROWS_AT_ONCE // max(K, 1))
    for part in (slice(t, t + step) for t in range(0, T if K else 0, step)):
        keys = rows[slots[part].clamp(min=0).long()].float()
        scores = torch.bmm(q[part].float(), keys.mT) * scale
        scores = scores.masked_fill(~used[part][:, None], -torch.inf)
        out[part] = scores.amax(-1)
    return out
