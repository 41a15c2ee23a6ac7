# SPDX-License-Identifier: Apache-2.0
"""What one MLA layer calls: cache write, decode (absorbed, MQA) and prefill (expanded, MHA)."""

from typing import Any

import torch
from mla_kernels.decode.query import Query, first_part, results_for, tokens_of
from mla_kernels.decode.tokens import mla_decode_tokens
from mla_kernels.layouts import MlaDims
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.attention.mla_attention import MLACommonImpl
from vllm.platforms import current_platform

from mla_backend import compat
from mla_backend.attention import support
from mla_backend.attention.adapters import refuse_absorbed_adapters
from mla_backend.attention.expanded import ExpandedPrompts
from mla_backend.attention.kernel import DecodeKernel
from mla_backend.attention.metadata import MlaDecodeMetadata, MlaMetadata
from mla_backend.stats import STATS


class MlaImpl(ExpandedPrompts, MLACommonImpl[MlaMetadata]):
    """Dense MLA through `mla_kernels`; on a GPU, prefill is vLLM's common path."""

    can_return_lse_for_decode: bool = True
    supports_dcp: bool = True  # asked from 0.30 on; the LSE is a natural logarithm
    # Ranks may share tokens out by several at a time beside drafts: each token is a row of its own.
    supports_mtp_with_cp_non_trivial_interleave_size: bool = True

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None,
        attn_type: str,
        kv_sharing_target_layer_name: str | None,
        **mla_args: Any,
    ) -> None:
        super().__init__(
            num_heads,
            head_size,
            scale,
            num_kv_heads,
            alibi_slopes,
            sliding_window,
            kv_cache_dtype,
            logits_soft_cap,
            attn_type,
            kv_sharing_target_layer_name,
            **mla_args,
        )
        support.refuse_layer_options(alibi_slopes, sliding_window, logits_soft_cap, attn_type)
        vllm_config = get_current_vllm_config()
        support.refuse_models(vllm_config)
        refuse_absorbed_adapters(self, vllm_config)
        self._on_cpu = current_platform.is_cpu()
        self.decode_kernel = DecodeKernel.choose(
            MlaDims(self.kv_lora_rank, self.qk_rope_head_dim),
            torch.get_default_dtype(),  # the model's, while vLLM builds it
            kv_cache_dtype,
            torch.device(current_platform.device_type),
        )
        self._fp8_cache = self.decode_kernel.kv_cache_dtype == torch.float8_e4m3fn
        # vLLM then quantises the absorbed query of every token that `forward_mqa` gets.
        self.supports_quant_query_input = self.decode_kernel.query_dtype == torch.float8_e4m3fn
        compat.split_kv_b_exactly()
        if self._on_cpu:
            compat.keep_kv_b_weight(self.kv_b_proj)
        self.kv_b_proj = compat.LatentsKeepTheirDtype(self.kv_b_proj)

    def forward_mqa(
        self,
        q: Query,
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: MlaMetadata,
        layer: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Absorbed attention of q [T, H, Dk], or its latent and rope parts; or codes of e4m3 with
        the layer's `_q_scale`.

        The T tokens are those of one launch or more (`MlaDecodeMetadata.rest`). Returns out
        [T, H, kv_lora_rank] and lse [T, H], fp32, natural log.
        """
        if self._on_cpu:
            lay_out_absorbed_weights(layer)
        decode = attn_metadata.decode
        assert decode is not None
        T = len(first_part(q))
        STATS.forward_mqa_calls += 1
        STATS.forward_mqa_tokens += T
        cache, kv_scale = kv_c_and_k_pe_cache, self._kv_scale(layer._k_scale)
        q_scale = layer._q_scale if self.supports_quant_query_input else None
        if decode.rest is None:
            return self._decode(q, cache, kv_scale, q_scale, decode)
        out, lse = results_for(q, self.kv_lora_rank, None, None)
        start, launch = 0, decode
        while launch is not None:
            part = slice(start, start + launch.tokens)
            results = out[part], lse[part]
            self._decode(tokens_of(q, part), cache, kv_scale, q_scale, launch, *results)
            start, launch = part.stop, launch.rest
        return out, lse

    def _decode(
        self,
        q: Query,
        cache: torch.Tensor,
        kv_scale: torch.Tensor | None,
        q_scale: torch.Tensor | None,
        decode: MlaDecodeMetadata,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention of the tokens of one launch, B requests of as many new tokens each."""
        assert decode.plan is not None and decode.lengths is not None
        return mla_decode_tokens(
            q,
            cache,
            decode.block_table,
            decode.lengths,
            scale=self.scale,
            kv_lora_rank=self.kv_lora_rank,
            kv_scale=kv_scale,
            q_scale=q_scale,
            rescale=self.decode_kernel.rescale,
            impl=self.decode_kernel.impl,
            plan=decode.plan,
            out=out,
            lse=lse,
            deterministic=self.decode_kernel.deterministic,
        )


def lay_out_absorbed_weights(layer: Any) -> None:
    """Make W_UK and W_UV of an MLA layer contiguous, once.

    vLLM keeps them as permuted views. On a CPU torch copies such a bf16 matrix for every product,
    which takes up to twenty times as long as the product.
    """
    for name in ("W_UK_T", "W_UV"):
        weight = getattr(layer, name, None)
        if weight is not None and not weight.is_contiguous():
            weight.data = weight.data.contiguous()
