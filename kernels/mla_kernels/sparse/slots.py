# SPDX-License-Identifier: Apache-2.0
"""Which slots of a token count, and what a sink does to its result: of both forms in torch."""

import torch


def used_slots(slots: torch.Tensor, num_rows: int, lengths: torch.Tensor | None) -> torch.Tensor:
    """Which of slots [T, K] name one of the cache's rows, within `lengths` [T] if given."""
    used = (slots >= 0) & (slots <= num_rows - 1)  # 2^31 rows would be none as an int32
    if lengths is not None:
        used &= torch.arange(slots.shape[1], device=slots.device) < lengths[:, None]
    return used


def apply_sink(
    out: torch.Tensor, lse: torch.Tensor, sink: torch.Tensor | None, deterministic: bool
) -> None:
    """Scale out [T, H, values] fp32 by exp(lse) / (exp(lse) + exp(sink)), in place.

    deterministic: token by token, as a sigmoid on a CPU has other bits in a vector than in what is
    left behind the last one, so it would depend on how many tokens there are.
    """
    if sink is None:
        return
    step = 1 if deterministic else max(len(out), 1)
    for some, sums in zip(out.split(step), lse.split(step), strict=True):
        factor = torch.sigmoid(sums - sink).masked_fill(sums == -torch.inf, 0.0)
        some *= factor[..., None]
