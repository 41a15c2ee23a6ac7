# SPDX-License-Identifier: Apache-2.0
"""An MLA layer as the AMD developer challenge's reference computes it: obvious, not absorbed.

Keys and values of every head are rebuilt from the whole latent cache at each step.
"""

import torch
from torch import nn

from mla_kernels.layer.config import MlaLayerConfig
from mla_kernels.layer.weights import MlaLayerWeights


class NaiveMlaLayer(nn.Module):
    """Decode steps of B requests of equal length over a contiguous cache of unrotated rows."""

    def __init__(self, config: MlaLayerConfig) -> None:
        super().__init__()
        c = self.config = config
        self.q_down = nn.Linear(c.dim, c.q_lora_rank, bias=False)
        self.kv_down = nn.Linear(c.dim, c.kv_lora_rank + c.rope_dim, bias=False)
        self.q_up = nn.Linear(c.q_lora_rank, c.num_heads * c.qk_dim, bias=False)
        self.kv_up = nn.Linear(c.kv_lora_rank, c.num_heads * (c.nope_dim + c.v_dim), bias=False)
        self.out = nn.Linear(c.num_heads * c.v_dim, c.dim, bias=False)

    def forward(self, x: torch.Tensor, past: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x [B, 1, dim], past [B, L, kv_lora_rank + rope] -> (y [B, 1, dim], cache with L + 1)."""
        c = self.config
        B, L = x.shape[0], past.shape[1] + 1
        cache = torch.cat([past, self.kv_down(x)], dim=1)
        latent, k_rope = cache.split([c.kv_lora_rank, c.rope_dim], dim=-1)

        q = self.q_up(self.q_down(x)).view(B, 1, c.num_heads, c.qk_dim).transpose(1, 2)
        q_nope, q_rope = q.split([c.nope_dim, c.rope_dim], dim=-1)
        kv = self.kv_up(latent).view(B, L, c.num_heads, c.nope_dim + c.v_dim).transpose(1, 2)
        k_nope, v = kv.split([c.nope_dim, c.v_dim], dim=-1)

        positions = torch.arange(L, device=x.device)
        q_rope = self._rotate(q_rope, positions[-1:])
        k_rope = self._rotate(k_rope[:, None], positions).expand(-1, c.num_heads, -1, -1)
        q = torch.cat([q_nope, q_rope], dim=-1)
        k = torch.cat([k_nope, k_rope], dim=-1)
        weights = (q @ k.mT / c.qk_dim**0.5).softmax(dim=-1)
        heads = (weights @ v).transpose(1, 2).reshape(B, 1, c.num_heads * c.v_dim)
        return self.out(heads), cache

    def rotated_rows(self, cache: torch.Tensor) -> torch.Tensor:
        """The rows [B, L, kv_lora_rank + rope] as the absorbed layer keeps them."""
        latent, rope = cache.split([self.config.kv_lora_rank, self.config.rope_dim], dim=-1)
        positions = torch.arange(cache.shape[1], device=cache.device)
        return torch.cat([latent, self._rotate(rope, positions)], dim=-1)

    def absorbed_weights(self) -> MlaLayerWeights:
        """The same weights for `mla_layer`."""
        return MlaLayerWeights.from_projections(
            self.config,
            q_down=self.q_down.weight.detach(),
            kv_down=self.kv_down.weight.detach(),
            q_up=self.q_up.weight.detach(),
            kv_up=self.kv_up.weight.detach(),
            out=self.out.weight.detach(),
        )

    def _rotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        half = self.config.rope_dim // 2
        exponent = torch.arange(half, device=x.device) / half
        angle = positions[:, None].double() * self.config.rope_theta ** -exponent.double()
        angle = torch.cat([angle, angle], dim=-1)
        first, second = x.chunk(2, dim=-1)
        turned = torch.cat([-second, first], dim=-1)
        return x * angle.cos().to(x.dtype) + turned * angle.sin().to(x.dtype)
