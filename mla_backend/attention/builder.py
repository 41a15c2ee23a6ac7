# SPDX-License-Identifier: Apache-2.0
"""What the metadata builders of dense and of sparse layers have in common."""

from typing import Any, ClassVar

from vllm.v1.attention.backend import AttentionCGSupport, AttentionMetadataBuilder

from mla_backend import compat, envs
from mla_backend.attention import support
from mla_backend.attention.shard import Shard
from mla_backend.attention.step_check import StepCheck
from mla_backend.stats import STATS


class StepBuilder(AttentionMetadataBuilder[Any]):
    """CUDA graphs of whole steps, and the check of each step if MLA_BACKEND_CHECK asks for it."""

    # Of requests that have as many new tokens each: nothing in `build` waits for the device then,
    # and every tensor keeps its address.
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    _step_check: StepCheck | None = None
    # `_join_draft_graphs` says of what.
    supports_draft_decode_metadata_update: bool = False

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        """None where torch computes on a GPU: it reads lengths on the host."""
        if envs.get("MLA_BACKEND_IMPL") in support.SLOW_IMPLS:
            return AttentionCGSupport.NEVER
        return cls._cudagraph_support

    def _check_steps_of(self, layer: Any, vllm_config: Any, shard: Shard | None = None) -> None:
        """Have `_check` check steps against the cache of `layer`, which is `shard` of it."""
        if envs.get("MLA_BACKEND_CHECK"):
            drafts = vllm_config.speculative_config is not None
            self._step_check = StepCheck(layer, self.kv_cache_spec.block_size, shard, drafts)

    def _check(self, common: Any) -> None:
        """ValueError for a fault in a step of requests, vLLM's CommonAttentionMetadata."""
        if self._step_check is not None and not compat.is_dummy_step():
            self._step_check(common)
            STATS.checked_steps += 1

    def _join_draft_graphs(self, vllm_config: Any) -> None:
        """Let the second model runner record all drafts of a step as one CUDA graph: it advances
        the lengths in place and calls `update_draft_decode_metadata` in between. Not where steps
        are checked, on the host, nor where ranks share the cache, whose lengths are others.
        """
        alone = vllm_config.parallel_config.decode_context_parallel_size == 1
        self.supports_draft_decode_metadata_update = alone and self._step_check is None

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> Any:
        """A step that is made up to capture a graph with: not checked."""
        check, self._step_check = self._step_check, None
        try:
            return super().build_for_cudagraph_capture(common_attn_metadata)
        finally:
            self._step_check = check


def most_requests(vllm_config: Any) -> int:
    """Most requests of a step, those that pad a CUDA graph included."""
    captured = vllm_config.compilation_config.max_cudagraph_capture_size or 0
    return int(max(vllm_config.scheduler_config.max_num_seqs, captured))


def drafts_of(vllm_config: Any) -> int:
    """Tokens that are drafted for each request, 0 without drafts."""
    speculative = vllm_config.speculative_config
    return 0 if speculative is None else int(speculative.num_speculative_tokens)
