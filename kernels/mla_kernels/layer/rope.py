# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding in the rotate-half form: the table, and its use in torch."""

import torch

from mla_kernels.checks import check_range, check_type
from mla_kernels.layer.config import MlaLayerConfig


def rope_table(
    config: MlaLayerConfig, num_positions: int, device: torch.device | str | None = None
) -> torch.Tensor:
    """[num_positions, rope_dim] fp32: the cosines of a position, then its sines.

    The angle of pair i is position * theta^(-2 i / rope_dim); computed in fp64, because in fp32
    it is off by 1e-2 at position 128K. ValueError for a negative num_positions.
    """
    check_type("config", config, MlaLayerConfig)
    check_range("num_positions", num_positions, 0, 2**31 - 1)
    half = config.rope_dim // 2
    frequency = config.rope_theta ** -(torch.arange(half, dtype=torch.float64) / half)
    angle = torch.arange(num_positions, dtype=torch.float64)[:, None] * frequency
    return torch.cat([angle.cos(), angle.sin()], dim=-1).float().to(device)


def rotate(x: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """x [..., rope_dim] rotated by table rows that broadcast against it; fp32."""
    cos, sin = cos_sin.chunk(2, dim=-1)
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
