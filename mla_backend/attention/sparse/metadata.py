# SPDX-License-Identifier: Apache-2.0
"""Computed once per step: the rows of the tokens, for the attention and for the indexer."""

from dataclasses import dataclass
from typing import Any

import torch
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.attention.backend import AttentionMetadata

from mla_backend import compat
from mla_backend.attention import support
from mla_backend.attention.builder import StepBuilder, drafts_of, most_requests
from mla_backend.attention.prefill import PrefillTile
from mla_backend.attention.shard import Shard
from mla_backend.attention.sparse.indexer_layer import attached
from mla_backend.attention.sparse.rows import RowsBuilder, TokenRows, max_tokens
from mla_backend.attention.sparse.short_prompts import ShortPrompts, can_expand
from mla_backend.attention.sparse.warmup import warm_up_attention, warm_up_indexer
from mla_backend.stats import STATS


@dataclass
class SparseMetadata(AttentionMetadata):
    """What vLLM's MLA layer and our attention read.

    All tokens that go through `forward_mqa` count as decode tokens, and `rows` are theirs. With
    `prefill`, the step ends with `num_prefills` prompts that go through `forward_mha`: none of
    their tokens sees more than the indexer may choose.
    """

    num_actual_tokens: int
    num_decodes: int
    num_decode_tokens: int
    rows: TokenRows
    num_prefills: int = 0
    prefill: Any = None
    prefill_tiles: list[PrefillTile] | None = None
    decode: None = None
    # Compared by vLLM where it quantises the output of a layer: no longer than is read.
    prefill_max_seq_len: int = 0
    topk_tokens: int = 0
    # [B] and [B + 1] int32, of all requests, which vLLM 0.28 and later read under decode context
    # parallelism: rows of no request, or of one without a token, count for nothing.
    seq_lens: torch.Tensor | None = None
    query_start_loc: torch.Tensor | None = None


@dataclass
class IndexerMetadata(AttentionMetadata):
    """`slot_mapping` [T] int64: where the keys of the new tokens go, -1 = nowhere."""

    rows: TokenRows
    slot_mapping: torch.Tensor


class _TokensBuilder(StepBuilder):
    """Shared by both builders."""

    def _make_rows_builder(self, vllm_config: Any, device: torch.device) -> tuple[int, int, int]:
        """Returns the most tokens, requests and blocks of a request in a step."""
        tokens, shard = max_tokens(vllm_config), Shard.of(vllm_config)
        if shard is not None:
            support.refuse_interleave(shard.interleave, compat.deals_within_64(vllm_config))
        self._rows = RowsBuilder(tokens, device, shard)
        width = compat.block_table_width(vllm_config, support.BLOCK_SIZE, sparse=True)
        return tokens, most_requests(vllm_config), width

    def update_draft_decode_metadata(self, metadata: Any) -> None:
        """The rows of a draft of one token each, SparseMetadata or IndexerMetadata, whose lengths
        have been advanced in place."""
        self._rows.refill(metadata.rows)


class SparseMetadataBuilder(_TokensBuilder):
    """Builds `SparseMetadata`, once per step."""

    _short_prompts: ShortPrompts | None = None

    def __init__(
        self,
        kv_cache_spec: Any,
        layer_names: list[str],
        vllm_config: Any,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        limits = self._make_rows_builder(vllm_config, device)
        layer = vllm_config.compilation_config.static_forward_context[layer_names[0]]
        shard = Shard.of(vllm_config)
        self._check_steps_of(layer, vllm_config, shard)
        self._join_draft_graphs(vllm_config)
        if shard is not None and drafts_of(vllm_config):
            compat.deal_draft_slots(shard.slots)
        if layer.impl.kernel.attention in support.GPU_IMPLS:
            warm_up_attention(layer, *limits)
        if layer.impl.supports_dense_mha_prefill:
            self._expand_short_prompts(layer_names, vllm_config)

    def _expand_short_prompts(self, layer_names: list[str], vllm_config: Any) -> None:
        layers = vllm_config.compilation_config.static_forward_context
        if not can_expand(layers[layer_names[0]]):
            return
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
        added = compat.tokens_added_to_drafts(layer_names, vllm_config)
        self._short_prompts = ShortPrompts(
            layers[layer_names[0]],
            max(self.reorder_batch_threshold, 1 + drafts_of(vllm_config) + added),
            self.kv_cache_spec.block_size,
            self.device,
            added,
        )
        own = vllm_config.model_config.hf_text_config.num_hidden_layers
        for name in layer_names:
            if extract_layer_index(name) < own:
                layers[name].impl.score_no_short_prompts(name)

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> SparseMetadata:
        common = common_attn_metadata
        self._check(common)
        STATS.sparse_steps += 1
        T, B, rows = common.num_actual_tokens, common.num_reqs, self._rows.build(common)
        first = None if self._short_prompts is None else self._short_prompts.find(common)
        if self._short_prompts is None or first is None:
            lengths, starts = common.seq_lens[:B], common.query_start_loc[: B + 1]
            return SparseMetadata(T, B, T, rows, seq_lens=lengths, query_start_loc=starts)
        STATS.prefill_steps += 1
        tokens = int(common.query_start_loc_cpu[first])
        rows = rows.first(first, tokens)
        prefill, tiles = self._short_prompts.describe(common, first)
        return SparseMetadata(T, first, tokens, rows, B - first, prefill, tiles)


class IndexerMetadataBuilder(_TokensBuilder):
    """Builds `IndexerMetadata`, once per step."""

    def __init__(
        self,
        kv_cache_spec: Any,
        layer_names: list[str],
        vllm_config: Any,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._join_draft_graphs(vllm_config)
        limits = self._make_rows_builder(vllm_config, device)
        layers = vllm_config.compilation_config.static_forward_context
        indexer = attached(layers[layer_names[0]])
        if indexer.shared is not None:
            indexer.shared.shard = Shard.of(vllm_config)
        if device.type != "cpu" and indexer.impl not in support.SLOW_IMPLS:
            warm_up_indexer(indexer, *limits)

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> IndexerMetadata:
        common = common_attn_metadata
        slots = common.slot_mapping[: common.num_actual_tokens]
        return IndexerMetadata(self._rows.build(common), slots)
