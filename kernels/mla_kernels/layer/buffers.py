# SPDX-License-Identifier: Apache-2.0
"""The intermediate results of a layer's decode step, allocated once and reused."""

from dataclasses import dataclass

import torch

from mla_kernels import checks
from mla_kernels.layer.config import MlaLayerConfig


@dataclass(frozen=True)
class MlaLayerBuffers:
    """One set serves all layers of a model that run one after another.

    down    [B, q_lora_rank + kv_lora_rank + rope]
    q_up    [B, H, nope + rope]
    q       [B, 1, H, kv_lora_rank + rope]    the absorbed, rotated query
    latent  [B, 1, H, kv_lora_rank]           attention output
    lse     [B, 1, H] fp32                    its log-sum-exp, which nobody reads
    v       [B, H, v]
    out     [B, 1, dim]                       what `mla_layer` returns
    """

    down: torch.Tensor
    q_up: torch.Tensor
    q: torch.Tensor
    latent: torch.Tensor
    lse: torch.Tensor
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
        """ValueError for a negative batch size."""
        checks.check_type("config", config, MlaLayerConfig)
        checks.check_range("batch_size", batch_size, 0, 2**31 - 1)
        shapes = _shapes(config, batch_size)
        return cls(
            **{
                name: torch.empty(shape, dtype=_dtype(name, dtype), device=device)
                for name, shape in shapes.items()
            }
        )

    def check_fits(self, config: MlaLayerConfig, x: torch.Tensor) -> None:
        """ValueError unless they are as `allocate` makes them for this layer and a batch like x."""
        for name, shape in _shapes(config, x.shape[0]).items():
            buffer = getattr(self, name)
            checks.check_shape(f"buffers.{name}", buffer, shape)
            checks.check_dtype(f"buffers.{name}", buffer, (_dtype(name, x.dtype),))
            checks.check_device(f"buffers.{name}", buffer, x.device)
            checks.check_contiguous(f"buffers.{name}", buffer)


def _dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if name == "lse" else dtype


def _shapes(config: MlaLayerConfig, B: int) -> dict[str, tuple[int, ...]]:
    c = config
    return {
        "down": (B, c.down_dim),
        "q_up": (B, c.num_heads, c.qk_dim),
        "q": (B, 1, c.num_heads, c.cache.head_dim),
        "latent": (B, 1, c.num_heads, c.kv_lora_rank),
        "lse": (B, 1, c.num_heads),
        "v": (B, c.num_heads, c.v_dim),
        "out": (B, 1, c.dim),
    }
