# SPDX-License-Identifier: Apache-2.0
"""The scores of the keys that a top-k chose, in torch."""

import torch


def write_values(scores: torch.Tensor, chosen: torch.Tensor, values: torch.Tensor) -> None:
    """values [T, k] fp32 = scores [T, width] at chosen [T, k] int32, -inf where chosen is negative.

    Reads nothing back, so it runs under CUDA graphs.
    """
    if scores.shape[1] == 0:
        values.fill_(float("-inf"))
        return
    values.copy_(scores.gather(1, chosen.clamp(min=0).long()))
    values.masked_fill_(chosen < 0, float("-inf"))
