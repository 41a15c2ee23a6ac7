# SPDX-License-Identifier: Apache-2.0
"""Computed once per step, shared by all layers: the decode plan and the prefill tiles.

A step, in order:

1. vLLM's runner puts decode requests first, those of up to `reorder_batch_threshold` new tokens. It
   reads it between steps, when it is 1 plus the number of drafts.
2. `build` may raise the threshold for this one step: ends of prompts that are cheaper in absorbed
   form (extends.py) are then counted among the decodes, and so is the token that a draft model of
   its own has more of each request.
3. vLLM's `build` splits the step at the threshold, and calls `_build_decode` for the first part.
   The rest are prompts, in expanded form by vLLM (on a CPU by our tiles).
4. `_build_decode`: requests of as many new tokens each are one launch. Others are cut into pieces,
   and each run of equal pieces is a launch: a chain of `MlaDecodeMetadata` by `rest`. Under decode
   context parallelism every drafted token is a piece.
5. StepPlans updates a plan for each launch, on the device.
"""

import itertools
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from mla_kernels import MlaDecodePlan
from mla_kernels.decode.plan.api import MAX_S_Q
from vllm.config import CUDAGraphMode
from vllm.logger import init_logger
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonDecodeMetadata,
    MLACommonMetadata,
    MLACommonMetadataBuilder,
    QueryLenSupport,
)

from mla_backend import compat, envs
from mla_backend.attention import extends, fp8_query, support
from mla_backend.attention.builder import StepBuilder, drafts_of, most_requests
from mla_backend.attention.kernel import DecodeKernel
from mla_backend.attention.prefill import PrefillTile, plan_prefill
from mla_backend.attention.shard import Shard, Shares
from mla_backend.attention.step_plans import StepPlans
from mla_backend.attention.warmup import warm_up
from mla_backend.refusals import cannot_serve
from mla_backend.stats import STATS

logger = init_logger("vllm.mla_backend")


@dataclass
class MlaDecodeMetadata(MLACommonDecodeMetadata):
    """`block_table` [B, max_blocks], `lengths` [B] and the kernel's plan for them.

    They are of the first `tokens` tokens, B requests (or pieces of some) of as many new tokens
    each; `rest` describes the others of the step, if there are any, in the same way. `seq_lens` are
    the same but for drafts under DCP: there those of the requests, by which vLLM (0.32) knows of
    whom a rank has nothing.
    """

    lengths: torch.Tensor | None = None
    plan: MlaDecodePlan | None = None
    tokens: int = 0
    rest: "MlaDecodeMetadata | None" = None


@dataclass
class MlaMetadata(MLACommonMetadata[MlaDecodeMetadata]):
    """vLLM's MLA metadata and, on CPU, the tiles of its prefill requests."""

    prefill_tiles: list[PrefillTile] | None = None


def microbatched_graphs(vllm_config: Any, query_len: int) -> list[int]:
    """Tokens of the CUDA graphs of whole decode steps, `query_len` of each request, that vLLM
    captures in microbatches (DBO). Its second model runner rounds sizes up to whole requests."""
    parallel, compilation = vllm_config.parallel_config, vllm_config.compilation_config
    mode = compilation.cudagraph_mode
    if not parallel.use_ubatching or mode is None or mode.decode_mode() != CUDAGraphMode.FULL:
        return []
    sizes = compilation.cudagraph_capture_sizes or []
    if vllm_config.use_v2_model_runner:
        most = vllm_config.scheduler_config.max_num_seqs * query_len
        most = min(most, compilation.max_cudagraph_capture_size)
        rounded = {-(-size // query_len) * query_len for size in sizes}
        sizes = sorted(size for size in rounded if size <= most)
    return [size for size in sizes if size >= parallel.dbo_decode_token_threshold]


class MlaMetadataBuilder(StepBuilder, MLACommonMetadataBuilder[MlaMetadata]):
    """Builds `MlaMetadata`, once per step."""

    query_len_support: ClassVar[QueryLenSupport] = QueryLenSupport.UNIFORM
    reorder_batch_threshold: int
    _drafts = 0
    # New tokens more of each request than vLLM's host lengths say, in steps of several.
    _added = 0
    # This rank's part of the cache, whether drafts are verified over it, and of lengths, where vLLM
    # gives wrong ones or none.
    _shard = Shard()
    _deals_drafts = False
    _shares: Shares | None = None
    # Of the step at hand, whose query lengths then need not be looked at.
    _one_token_each = False

    def __init__(
        self,
        kv_cache_spec: Any,
        layer_names: list[str],
        vllm_config: Any,
        device: torch.device,
    ) -> None:
        super().__init__(
            kv_cache_spec,
            layer_names,
            vllm_config,
            device,
            MlaMetadata,
            supports_dcp_with_varlen=True,
        )
        layer = vllm_config.compilation_config.static_forward_context[layer_names[0]]
        # The layers' own: those of a draft model may be others than the model's, which vLLM 0.26
        # counts here. Under DCP the ranks of a group gather their heads.
        heads = layer.impl.num_heads * self.dcp_world_size
        self._on_cpu = self.device.type == "cpu"
        if self._on_cpu:
            compat.skip_chunked_context_metadata()
        self._drafts = drafts_of(vllm_config)
        self._added = compat.tokens_added_to_drafts(layer_names, vllm_config)
        # vLLM's threshold has what parallel drafting adds. Beyond what the kernels take, requests
        # of a draft model are ends of prompts to it.
        longest = min(1 + self._drafts + self._added, MAX_S_Q)
        self._most_s_q = max(self.reorder_batch_threshold, longest)
        self._refuse_steps(vllm_config, heads)
        self._refuse_prompts(layer)
        self._share_the_cache(layer, vllm_config)
        self._check_steps_of(layer, vllm_config, self._shard)
        self._join_draft_graphs(vllm_config)
        kernel, requests = layer.impl.decode_kernel, most_requests(vllm_config)
        max_blocks = compat.block_table_width(vllm_config, support.BLOCK_SIZE)
        self._plans = StepPlans(
            kernel,
            heads,
            requests,
            vllm_config.model_config.max_model_len,
            self.device,
            self._make_extend_rows(kernel, heads, requests, max_blocks),
        )
        most_s_q = 1 if self._deals_drafts else max(self._most_s_q, self._longest_piece)
        self._plans.reserve(most_s_q)
        if kernel.impl in support.GPU_IMPLS:
            self._say_what_decodes(kernel, heads, requests, most_s_q)
            warm_up(
                layer,
                self._plans,
                num_heads=heads,
                max_s_q=most_s_q,
                max_blocks=max_blocks,
            )

    def _refuse_steps(self, vllm_config: Any, heads: int) -> None:
        """ValueError, now and not in a step, for shapes of steps that no kernel serves."""
        drafts, parallel = self._drafts, vllm_config.parallel_config
        if drafts and self.dcp_world_size > 1:
            speculative = vllm_config.speculative_config
            support.refuse_drafter(speculative.method, speculative.parallel_drafting)
        if self.dcp_world_size > 1:
            support.refuse_shared_microbatches(parallel.num_ubatches)
        support.refuse_step_shape(heads, self._most_s_q, drafts=drafts)
        query_len = 1 + drafts  # of a graph; parallel drafting raises the threshold further
        graphs = microbatched_graphs(vllm_config, query_len)
        support.refuse_microbatches(query_len, parallel.num_ubatches, graphs)

    def _refuse_prompts(self, layer: Any) -> None:
        """ValueError for a layer that would end the engine at the first prompt."""
        if not compat.wants_fp8_prompts(layer):
            return
        fp8, cache = torch.float8_e4m3fn, layer.impl.decode_kernel.kv_cache_dtype
        if cache == (torch.uint8 if self.q_data_type == fp8 else fp8):
            raise cannot_serve(support.fp8_prompts_reason(layer.impl.kv_cache_dtype))

    def _share_the_cache(self, layer: Any, vllm_config: Any) -> None:
        """Learn which tokens this rank has of each request."""
        if self.dcp_world_size == 1:
            return
        asked = envs.get("MLA_BACKEND_EXTEND_TOKENS")
        support.refuse_extends_of_ranks(asked, self.dcp_world_size)
        interleave = vllm_config.parallel_config.cp_kv_cache_interleave_size
        support.refuse_interleave(interleave, compat.deals_within_64(vllm_config))
        self._shard = Shard(self.dcp_world_size, layer.impl.dcp_rank, interleave)
        self._deals_drafts = self._drafts > 0
        if self._deals_drafts:
            compat.deal_draft_slots(self._shard.slots)
        if self._deals_drafts or compat.forgets_lengths_of_ranks(vllm_config):
            self._shares = Shares(self._shard, most_requests(vllm_config), self.device)

    def _make_extend_rows(
        self, kernel: DecodeKernel, heads: int, requests: int, max_blocks: int
    ) -> int:
        """Decide which ends of prompts are decoded, and make the buffers for requests that are cut
        into pieces. Returns how many pieces those have room for."""
        self._extend_tokens, self._longest_piece = 0, self._most_s_q
        if self._shard.size == 1:
            self._extend_tokens = extends.longest_extend(kernel, heads)
        absorbs = self._extend_tokens > self._most_s_q
        if absorbs:
            self._longest_piece = extends.longest_piece(kernel, heads)
        elif self._most_s_q == 1:
            return 0
        # Requests that are drafted for must never be split off as prompts, whose contexts vLLM
        # takes from the host: there they count the drafts that were rejected.
        self.query_len_support = QueryLenSupport.VARLEN  # type: ignore[misc]
        rows = extends.most_rows(requests, self._most_s_q, absorbs)
        self._rows = extends.ExtendRows(rows, max_blocks, self.device, self._shard)
        return rows

    def _say_what_decodes(
        self, kernel: DecodeKernel, heads: int, requests: int, most_s_q: int
    ) -> None:
        dtypes = kernel.kv_cache_dtype, kernel.query_dtype
        cache_dtype, query_dtype = (str(dtype).removeprefix("torch.") for dtype in dtypes)
        logger.info_once(
            "mla-backend decodes with %s (queries: %s), up to %d requests of 1 to %d new "
            "tokens, %d MiB of workspace.",
            kernel.impl,
            query_dtype,
            requests,
            max(most_s_q, self._most_s_q),
            self._plans.workspace_bytes >> 20,
        )
        rows = heads * (1 if self._deals_drafts else self._most_s_q)
        if hint := fp8_query.hint(kernel.impl, cache_dtype, query_dtype, rows):
            logger.warning_once(hint)

    def _build_decode(
        self,
        block_table_tensor: torch.Tensor,
        seq_lens_device: torch.Tensor,
        query_start_loc_cpu: torch.Tensor,
        query_start_loc_device: torch.Tensor,
        num_decode_tokens: int,
        dcp_tot_seq_lens_device: torch.Tensor | None,
        **_: Any,
    ) -> MlaDecodeMetadata:
        STATS.decode_steps += 1
        starts, tokens = query_start_loc_device, num_decode_tokens
        whole = (block_table_tensor, seq_lens_device, tokens)
        if self._one_token_each and tokens >= len(seq_lens_device):
            launches = [whole]
        elif self._deals_drafts:
            # Each token sees its own number of this rank's, which are every so many of a request's.
            assert dcp_tot_seq_lens_device is not None
            launches = self._rows.fill(
                starts, dcp_tot_seq_lens_device, block_table_tensor, 0, [(tokens, 1)]
            )
        else:
            query_lens = np.diff(query_start_loc_cpu.numpy())
            launches = self._cut(whole, query_lens, starts)
        decodes = [
            MlaDecodeMetadata(
                block_table=block_table,
                seq_lens=seq_lens_device if self._deals_drafts else lengths,
                dcp_tot_seq_lens=dcp_tot_seq_lens_device,
                lengths=lengths,
                plan=self._plans.for_step(lengths, tokens // len(lengths)),
                tokens=tokens,
            )
            for block_table, lengths, tokens in launches
        ]
        for before, after in itertools.pairwise(decodes):
            before.rest = after
        return decodes[0]

    def _cut(
        self, whole: extends.Launch, query_lens: np.ndarray, query_start_loc: torch.Tensor
    ) -> list[extends.Launch]:
        """Launches of requests, or of pieces of some, of as many new tokens each.

        whole            all requests [B] of the decode part
        query_lens       [B] new tokens of each, on the host
        query_start_loc  [B + 1] where they begin, on the device
        """
        block_table, seq_lens, tokens = whole
        requests = len(seq_lens)
        new = query_lens[query_lens > 0]  # none is a padded request of a graph
        if tokens < requests and new.max(initial=1) == 1:
            # A microbatch: it may begin or end with a request of which it has no token, and may
            # have none at all but padding, when nobody attends.
            first = int(np.flatnonzero(query_lens)[0]) if len(new) else 0
            some = slice(first, first + max(tokens, 1))
            return [(block_table[some], seq_lens[some], max(tokens, 1))]
        fits = requests <= tokens <= requests * self._most_s_q
        if len(new) == 0 or (new.min() == new.max() and fits):
            return [whole]
        STATS.extend_steps += 1
        equal = extends.equal_run(query_lens, self._most_s_q)
        s_q = int(query_lens[0])
        taken = {s_q} if equal else set()
        rest = self._rows.fill(
            query_start_loc,
            seq_lens,
            block_table,
            equal * s_q,
            extends.pieces(
                query_lens[equal:], self._longest_piece, None if self._on_cpu else taken
            ),
        )
        return [(block_table[:equal], seq_lens[:equal], equal * s_q), *rest] if equal else rest

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> MlaMetadata:
        common = compat.without_padding(common_attn_metadata)
        self._check(common)
        self._one_token_each = common.max_query_len == 1
        if self._drafts and common.max_query_len > self._most_s_q:
            common = compat.bound_lengths(common, self._added)
        if self._shares is not None:
            # vLLM's first model runner computes its own on the host, before it knows which drafts
            # were rejected, and its drafters' steps have those of the model's, or none. The second
            # one's dummy steps have none: graphs must find those of any step in one place.
            common = common.replace(dcp_local_seq_lens=self._shares.of(common.seq_lens))
        # Between steps it is what vLLM orders its batches by, and judges whether microbatches may
        # read what is only being written: a prompt's end is not a decode request to either.
        between_steps = self.reorder_batch_threshold
        self.reorder_batch_threshold = self._decode_threshold(common)
        try:
            metadata = super().build(common_prefix_len, common, fast_build)
        finally:
            self.reorder_batch_threshold = between_steps
        if metadata.prefill is not None:
            STATS.prefill_steps += 1
            if not self._on_cpu:
                compat.merge_every_context(
                    metadata.prefill,
                    lambda: extends.host_lengths(common)[1][metadata.num_decodes :],
                )
            else:
                metadata.prefill_tiles = plan_prefill(
                    metadata.prefill.block_table,
                    metadata.prefill.query_start_loc,
                    common.seq_lens[metadata.num_decodes : metadata.num_reqs],
                    block_size=self.kv_cache_spec.block_size,
                )
        return metadata

    def update_draft_decode_metadata(self, metadata: MlaMetadata) -> None:
        """Plan anew for a draft of one token each, whose lengths have been advanced in place; may
        be captured in a CUDA graph."""
        if (decode := metadata.decode) is not None:
            assert decode.plan is not None and decode.lengths is not None and decode.rest is None
            decode.plan.update(decode.lengths)

    def _decode_threshold(self, common: Any) -> int:
        """New tokens up to which vLLM shall count a request of this step among the decodes."""
        if self._extend_tokens <= self._most_s_q or common.max_query_len <= self._most_s_q:
            return self._most_s_q
        lengths = extends.host_lengths(common)
        if extends.pays(*lengths, self._most_s_q, self._extend_tokens):
            return self._extend_tokens
        return self._most_s_q
