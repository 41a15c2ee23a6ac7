# SPDX-License-Identifier: Apache-2.0
"""The intermediate results of a layer's decode step, allocated once and reused."""

from dataclasses import dataclass

import torch

from mla_kernels.layer.config import MlaLayerConfig


@dataclass(frozen=True)
class MlaLayerBuffers:
    """One set serves all layers of a model that run one after another.

    down    [B, q_lora_rank + kv_lora_rank + rope]
    q_up    [B, H, nope + rope]
    q       [B, 1, H, kv_lora_rank + rope]    the absorbed, rotated query
    latent  [B, 1, H, kv_lora_rank]           attention output
    v       [B, H, v]
    out     [B, 1, dim]                       what `mla_layer` returns
    """

    down: torch.Tensor
    q_up: torch.Tensor
    q: torch.Tensor
    latent: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor

    @classmethod
    def allocate(
        cls,
        config: MlaLayerConfig,
        batch_size: int,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> "MlaLayerBuffers":
        c, B = config, batch_size

        def empty(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        return cls(
            down=empty(B, c.down_dim),
            q_up=empty(B, c.num_heads, c.qk_dim),
            q=empty(B, 1, c.num_heads, c.cache.head_dim),
            latent=empty(B, 1, c.num_heads, c.kv_lora_rank),
            v=empty(B, c.num_heads, c.v_dim),
            out=empty(B, 1, c.dim),
        )
