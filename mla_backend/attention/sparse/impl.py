# SPDX-License-Identifier: Apache-2.0
"""What one sparse MLA layer calls: the cache write, and attention over the chosen tokens."""

from typing import Any

import torch
from mla_kernels import mla_sparse_attention, positions_to_slots
from mla_kernels.decode.query import Query, first_part
from mla_kernels.layouts import MlaDims
from vllm.config import get_current_vllm_config
from vllm.platforms import current_platform

from mla_backend import compat
from mla_backend.attention import support
from mla_backend.attention.adapters import refuse_absorbed_adapters
from mla_backend.attention.expanded import ExpandedPrompts
from mla_backend.attention.impl import lay_out_absorbed_weights
from mla_backend.attention.kernel import cache_dtype
from mla_backend.attention.sparse.indexer import take_over
from mla_backend.attention.sparse.indexer_backend import IndexerBackend
from mla_backend.attention.sparse.indexer_layer import attached, is_attached
from mla_backend.attention.sparse.kernel import SparseKernel, attention_workspace, slots_buffer
from mla_backend.attention.sparse.metadata import SparseMetadata
from mla_backend.attention.sparse.rows import max_tokens
from mla_backend.attention.sparse.short_prompts import ExpandedBytes, are_expanded, can_expand
from mla_backend.refusals import cannot_serve
from mla_backend.stats import STATS

# What vLLM's common path of prompts needs beside what every impl is given.
_EXPANDING = (
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "qk_head_dim",
    "v_head_dim",
    "kv_b_proj",
)


class SparseMlaImpl(ExpandedPrompts):
    """Sparse MLA through `mla_kernels`; prefill tokens take the same path as decode tokens, but for
    those of short prompts (`short_prompts`)."""

    is_sparse = True
    masked_mha_available = False  # of prompts that see more than they read; asked for on sm_100
    supports_quant_query_input = False
    _use_flashinfer_concat_mla_k = False
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
        *,
        topk_indices_buffer: torch.Tensor | None = None,
        indexer: Any = None,
        **mla_args: Any,
    ) -> None:
        support.refuse_layer_options(alibi_slopes, sliding_window, logits_soft_cap, attn_type)
        vllm_config = get_current_vllm_config()
        support.refuse_models(vllm_config)
        refuse_absorbed_adapters(self, vllm_config)
        support.refuse_hisparse(vllm_config)
        self._on_cpu = current_platform.is_cpu()
        support.refuse_sparse_dcp(vllm_config, on_cpu=self._on_cpu)
        # Under DCP the ranks of a group gather their heads.
        dcp = vllm_config.parallel_config.decode_context_parallel_size
        self.query_heads = num_heads * dcp
        support.refuse_heads(self.query_heads)
        super().__init__(
            num_heads,
            head_size,
            scale,
            num_kv_heads,
            kv_cache_dtype,
            **{name: mla_args[name] for name in _EXPANDING},
        )
        compat.split_kv_b_exactly()
        if self._on_cpu:
            compat.keep_kv_b_weight(self.kv_b_proj)
        self.kv_b_proj = compat.LatentsKeepTheirDtype(self.kv_b_proj)
        if indexer is None:
            layers = vllm_config.compilation_config.static_forward_context.values()
            parallel = vllm_config.parallel_config
            support.refuse_borrowed_choice(
                parallel.pipeline_parallel_size,
                parallel.num_ubatches,
                chosen=any(is_attached(layer) for layer in layers),
            )
        self._indexer, self._shared_buffer = indexer, topk_indices_buffer
        buffer = self.topk_indices_buffer
        if buffer is None:
            raise cannot_serve(
                f"a sparse layer without an indexer and without a top-k buffer. {support.ELSE}"
            )
        device = buffer.device
        self.dtype = torch.get_default_dtype()  # the model's, while vLLM builds it
        self.kv_cache_element = cache_dtype(kv_cache_dtype, self.dtype)
        self._fp8_cache = self.kv_cache_element == torch.float8_e4m3fn
        self.supports_dense_mha_prefill = are_expanded(kv_cache_dtype, self.dtype, vllm_config)
        dims = MlaDims(self.kv_lora_rank, head_size - self.kv_lora_rank)
        self.kernel = SparseKernel.choose(
            device, dims, self.dtype, self.kv_cache_element, self.query_heads
        )
        tokens, topk = max_tokens(vllm_config), buffer.shape[1]
        self._slots = slots_buffer(vllm_config, tokens, topk, device)
        self._workspace = attention_workspace(
            vllm_config,
            tokens,
            self.query_heads,
            topk,
            self.kv_lora_rank,
            device,
            self.kernel.attention,
        )
        if indexer is not None:
            expanded = None
            if self.supports_dense_mha_prefill and can_expand(indexer) and not self._on_cpu:
                capability = torch.cuda.get_device_capability(device)
                expanded = ExpandedBytes.of(self, self.dtype.itemsize, capability)
            # vLLM has the queries of all heads and, while it adds up those of the ranks, their
            # outputs twice, which are narrower.
            gathered = 3 * self.query_heads * head_size * self.dtype.itemsize if dcp > 1 else 0
            take_over(indexer, self.kernel, IndexerBackend, vllm_config, device, expanded, gathered)

    @property
    def topk_indices_buffer(self) -> Any:
        """What the layer's indexer writes now: vLLM 0.30 and later give the indexers of a draft the
        buffer of the model, after its layers are built. A layer without an indexer reads what the
        last one before it chose."""
        return self._shared_buffer if self._indexer is None else self._indexer.topk_indices_buffer

    @topk_indices_buffer.setter
    def topk_indices_buffer(self, buffer: torch.Tensor) -> None:
        """For models of vLLM whose layers pass such a change on to us."""
        self._indexer, self._shared_buffer = None, buffer

    def score_no_short_prompts(self, layer_name: str) -> None:
        """Where the tokens of such prompts attend in expanded form, the layer's indexer need not
        choose for them; `layer_name` is this layer's, whose metadata says so."""
        if self._indexer is not None:
            attached(self._indexer.k_cache).attention = layer_name

    def prepare_for_batch(self, attn_metadata: Any) -> None:
        """vLLM 0.30 and later on a GPU ask before each batch; nothing needs to be prepared."""

    def record_logical_topk_ready(self) -> None:
        """vLLM 0.30 and later say that the indexer is done; all is in one stream, so it is."""

    def forward_mqa(
        self,
        q: Query,
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: SparseMetadata,
        layer: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Absorbed attention of q [T, H, Dk], or its latent and rope parts, T all tokens that
        `forward_mha` does not get.

        Returns out [T, H, kv_lora_rank] and lse [T, H], fp32, natural log. Under DCP H are the
        heads of all ranks and the results those of this rank's tokens, 0 and -inf without any; vLLM
        adds them up.
        """
        if self._on_cpu:
            lay_out_absorbed_weights(layer)
        T = len(first_part(q))
        STATS.forward_mqa_calls += 1
        STATS.forward_mqa_tokens += T
        rows = attn_metadata.rows
        slots = positions_to_slots(
            self.topk_indices_buffer[:T],
            rows.block_table,
            request_ids=rows.request_ids,
            block_size=support.BLOCK_SIZE,
            out=None if self._slots is None else self._slots[:T],
            impl=self.kernel.indexer,
        )
        return mla_sparse_attention(
            q,
            kv_c_and_k_pe_cache,
            slots,
            scale=self.scale,
            kv_lora_rank=self.kv_lora_rank,
            kv_scale=self._kv_scale(layer._k_scale),
            rescale=self.kernel.rescale,
            deterministic=self.kernel.deterministic,
            impl=self.kernel.attention,
            workspace=self._workspace,
        )
