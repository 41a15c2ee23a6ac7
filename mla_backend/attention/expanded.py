# SPDX-License-Identifier: Apache-2.0
"""Attention of prompts in expanded form (MHA), as dense layers have it and sparse ones for prompts
of which every token reads all before it."""

from typing import Any

import torch
from mla_kernels.cache.rows import rows_as_float
from vllm.model_executor.layers.attention.mla_attention import MLACommonBaseImpl

from mla_backend.attention.cache_write import CacheWrites
from mla_backend.attention.prefill import run_prefill
from mla_backend.stats import STATS


class ExpandedPrompts(CacheWrites, MLACommonBaseImpl):
    """What vLLM calls for the tokens of a step that are not `forward_mqa`'s; on a GPU it is vLLM's
    common path."""

    _on_cpu: bool
    kv_b_proj: Any

    def forward_mha(
        self,
        q: torch.Tensor,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: Any,
        k_scale: torch.Tensor,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
    ) -> None:
        """Prefill attention of q [T, H, Dqk] into `output` [T, H * v_head_dim]."""
        STATS.forward_mha_calls += 1
        STATS.forward_mha_tokens += q.shape[0]
        if not self._on_cpu:
            super().forward_mha(
                q,
                kv_c_normed,
                k_pe,
                kv_c_and_k_pe_cache,
                attn_metadata,
                k_scale,
                output,
                output_scale,
            )
            return
        assert attn_metadata.prefill_tiles is not None
        kv_scale = self._kv_scale(k_scale)

        def expand(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            rows = rows_as_float(rows, q.dtype, self.kv_lora_rank, self.head_size, kv_scale)
            return self._keys_and_values(rows)

        run_prefill(
            q,
            kv_c_and_k_pe_cache,
            attn_metadata.prefill_tiles,
            expand,
            scale=self.scale,
            out=output.view(-1, self.num_heads, self.v_head_dim),
        )

    def _keys_and_values(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys [n, H, Dqk] and values [n, H, v_head_dim] of cache rows [n, Dk]."""
        latent, rope = rows.split([self.kv_lora_rank, self.qk_rope_head_dim], dim=-1)
        kv = self.kv_b_proj(latent.contiguous())[0].view(rows.shape[0], self.num_heads, -1)
        k_nope, v = kv.split([self.qk_nope_head_dim, self.v_head_dim], dim=-1)
        return self._concat_k_nope_k_pe(k_nope, rope[:, None]), v
