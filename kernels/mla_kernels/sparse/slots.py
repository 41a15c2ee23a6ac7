# SPDX-License-Identifier: Apache-2.0
"""Which slots of a token count, and what a sink does to its result: of both forms in torch."""

import torch


def used_slots(slots: torch.Tensor, num_rows: int, lengths: torch.Tensor | None) -> torch.Tensor:
    """Which of slots [T, K] name one of the cache's rows, within `lengths` [T] if given."""
    used = (slots >= 0) & (slots < num_rows)
    if lengths is not None:
        used &= torch.arange(slots.shape[1], device=slots.device) < lengths[:, None]
    return used


def apply_sink(out: torch.Tensor, lse: torch.Tensor, sink: torch.Tensor | None) -> None:
    """Scale out [T, H, values] fp32 by exp(lse) / (exp(lse) + exp(sink)), in place."""
    if sink is not None:
        factor = torch.sigmoid(lse - sink).masked_fill(lse == -torch.inf, 0.0)
        out *= factor[..., None]
