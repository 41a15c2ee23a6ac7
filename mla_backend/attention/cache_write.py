# SPDX-License-Identifier: Apache-2.0
"""The cache write of an MLA layer, dense or sparse."""

import torch
from mla_kernels import write_kv_cache

from mla_backend.stats import STATS


class CacheWrites:
    """What vLLM calls before the attention of a layer."""

    _fp8_cache: bool  # per-tensor e4m3, with the layer's scale

    def do_kv_cache_update(
        self,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        kv_cache_dtype: str,
        k_scale: torch.Tensor,
        skip_scale: bool = False,
    ) -> None:
        """Write the new tokens' latent [T, kv_lora_rank] and rope [T, 1, rope] rows."""
        if kv_cache.numel() == 0:
            return
        STATS.kv_cache_writes += 1
        if self._fp8_cache:
            kv_cache = kv_cache.view(torch.float8_e4m3fn)
        write_kv_cache(
            kv_c_normed,
            k_pe.squeeze(1),
            kv_cache,
            slot_mapping.flatten(),
            kv_scale=self._kv_scale(k_scale),
        )

    def _kv_scale(self, k_scale: torch.Tensor) -> torch.Tensor | None:
        return k_scale if self._fp8_cache else None
