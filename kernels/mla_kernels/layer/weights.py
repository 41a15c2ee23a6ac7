# SPDX-License-Identifier: Apache-2.0
"""The weights of an MLA layer, arranged once for decoding in absorbed form."""

from dataclasses import dataclass

import torch

from mla_kernels.checks import check_shape, check_tensor, check_type
from mla_kernels.layer.config import MlaLayerConfig
from mla_kernels.torch_modes import without_modes


@without_modes
def _joined(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Autocast joins no 16-bit floats but its own."""
    return torch.cat([first, second])


@dataclass(frozen=True)
class MlaLayerWeights:
    """Build with `from_projections`.

    down  [q_lora_rank + kv_lora_rank + rope, dim]   W_DQ and W_DKV in one matrix product
    q_up  [H * (nope + rope), q_lora_rank]           W_UQ
    k_up  [H, nope, kv_lora_rank]                    W_UK, applied to the query instead of the keys
    v_up  [H, kv_lora_rank, v]                       W_UV, applied to the attention output
    out   [dim, H * v]                               W_O
    """

    config: MlaLayerConfig
    down: torch.Tensor
    q_up: torch.Tensor
    k_up: torch.Tensor
    v_up: torch.Tensor
    out: torch.Tensor

    @classmethod
    @torch.no_grad()  # of parameters the copies would keep the originals alive
    def from_projections(
        cls,
        config: MlaLayerConfig,
        *,
        q_down: torch.Tensor,
        kv_down: torch.Tensor,
        q_up: torch.Tensor,
        kv_up: torch.Tensor,
        out: torch.Tensor,
    ) -> "MlaLayerWeights":
        """From projection matrices laid out as `torch.nn.Linear.weight`, [out, in].

        q_down   [q_lora_rank, dim]
        kv_down  [kv_lora_rank + rope, dim]
        q_up     [H * (nope + rope), q_lora_rank]     per head: nope, then rope
        kv_up    [H * (nope + v), kv_lora_rank]       per head: key nope, then value
        out      [dim, H * v]

        ValueError for a wrong shape or mixed dtypes or devices.
        """
        check_type("config", config, MlaLayerConfig)
        check_tensor("out", out)
        c = config
        given = {"q_down": q_down, "kv_down": kv_down, "q_up": q_up, "kv_up": kv_up, "out": out}
        shapes = {
            "q_down": (c.q_lora_rank, c.dim),
            "kv_down": (c.cache.head_dim, c.dim),
            "q_up": (c.num_heads * c.qk_dim, c.q_lora_rank),
            "kv_up": (c.num_heads * (c.nope_dim + c.v_dim), c.kv_lora_rank),
            "out": (c.dim, c.num_heads * c.v_dim),
        }
        for name, weight in given.items():
            check_shape(name, weight, shapes[name])
            if (weight.dtype, weight.device) != (out.dtype, out.device):
                raise ValueError(
                    f"Expected {name} in {out.dtype} on {out.device}, like `out`, "
                    f"got {weight.dtype} on {weight.device}"
                )
        heads = kv_up.view(c.num_heads, c.nope_dim + c.v_dim, c.kv_lora_rank)
        k_up, v_up = heads.split([c.nope_dim, c.v_dim], dim=1)
        return cls(
            config,
            down=_joined(q_down, kv_down),
            q_up=q_up.contiguous(),
            k_up=k_up.contiguous(),
            v_up=v_up.transpose(1, 2).contiguous(),
            out=out.contiguous(),
        )
