# SPDX-License-Identifier: Apache-2.0
"""Rotation and cache append of a layer's decode step, in torch."""

import torch

from mla_kernels.cache.api import write_kv_cache
from mla_kernels.layer.buffers import MlaLayerBuffers
from mla_kernels.layer.config import MlaLayerConfig
from mla_kernels.layer.rope import rotate


def rotate_and_append_torch(
    config: MlaLayerConfig,
    buffers: MlaLayerBuffers,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    table: torch.Tensor,
    *,
    kv_scale: float | torch.Tensor | None = None,
) -> None:
    """As `launch_rotate_and_append`: fills buffers.q[..., kv_lora_rank:] and one cache row each."""
    c, page = config, kv_cache.shape[1]
    position = (seq_lens.long() - 1).clamp(min=0)
    cos_sin = table[position]
    q_pe = buffers.q_up[:, :, c.nope_dim :]
    buffers.q[:, 0, :, c.kv_lora_rank :] = rotate(q_pe, cos_sin[:, None])
    kv_c, k_pe = buffers.down[:, c.q_lora_rank :].split([c.kv_lora_rank, c.rope_dim], dim=-1)
    block = block_table.gather(1, (position // page)[:, None]).squeeze(1).long()
    slot = torch.where(seq_lens > 0, block * page + position % page, -1)
    write_kv_cache(kv_c.float(), rotate(k_pe, cos_sin), kv_cache, slot, kv_scale=kv_scale)
