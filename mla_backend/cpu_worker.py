# SPDX-License-Identifier: Apache-2.0
"""vLLM's CPU worker, mended in three places of its sampling, in its drafting, its pipelines and its
caches.

A request with a seed under chunked prefill: the chunks of a prompt before its last one sample a
token that is thrown away. vLLM then takes the request's random generator back by an offset; torch's
CPU generators have none, and the engine dies.

Drafts in a step of which one request is sampled: vLLM's CPU form of `expand_batch_to_tokens` fills
a copy of what it returns, so drafts are judged by temperatures and limits from memory that nobody
wrote, in all requests of the step.

Steps without a draft in an engine that drafts, as that of a prompt is: from vLLM 0.32 on their no
tokens are limited to the top-k of their requests, whose largest k it asks for, and the engine dies.

Drafts with `disable_padded_drafter_batch`: on a CPU the lengths of a step and the host's bound of
them are then one tensor. vLLM adds the drafted token to both, so that from the second draft on more
tokens are read than there are.

Pipeline parallelism in eager mode: vLLM 0.27 and later leave out the dummy step in which stages
behind the first make their buffers, and these die in the first real one.

Hybrid models, as Ling 2.5: vLLM zeroes the blocks that a request newly gets, by their numbers. Of a
layer whose pages are smaller than a block (ours have 64 tokens) these name other requests' pages.
"""

import functools
from typing import Any

import torch
from vllm.distributed.parallel_state import get_pp_group
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.sample import rejection_sampler
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p
from vllm.v1.worker.cpu_worker import CPUModelRunner, CPUWorker


class MlaCpuWorker(CPUWorker):
    """vLLM's, with all six mends."""

    def init_device(self) -> None:
        super().init_device()
        rejection_sampler.expand_batch_to_tokens = expand_batch_to_tokens
        rejection_sampler.apply_top_k_top_p = limit_drafts
        if isinstance(self.model_runner, CPUModelRunner):  # the second runner has no generators
            keep_generators(self.model_runner)
            self.model_runner._zero_block_ids = functools.partial(zero_blocks, self.model_runner)
            part_lengths(getattr(self.model_runner, "drafter", None))

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        if not get_pp_group().is_first_rank:
            make_stage_buffers(self.model_runner)


def part_lengths(drafter: Any) -> None:
    """Give the steps of vLLM's `drafter` lengths of their own, if it cuts rejected drafts off."""
    if not hasattr(drafter, "prepare_inputs"):  # no drafts, or no model that makes them
        return
    prepare = drafter.prepare_inputs

    @functools.wraps(prepare)
    def prepare_inputs(*args: Any, **kwargs: Any) -> Any:
        common, token_indices = prepare(*args, **kwargs)
        return common.replace(seq_lens=common.seq_lens.clone()), token_indices

    drafter.prepare_inputs = prepare_inputs


def make_stage_buffers(runner: Any) -> None:
    """Make what a model `runner` of vLLM receives from the stage before, as its dummy step does."""
    if runner.intermediate_tensors is None:
        runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
            batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
        )


def zero_blocks(runner: Any, block_ids: list[int]) -> None:
    """Zero the pages of `block_ids`, blocks of vLLM's cache manager, in all full attention layers
    of a model `runner` of vLLM, which may cut a block into several pages."""
    config, layers = runner.kv_cache_config, runner.compilation_config.static_forward_context
    for group in config.kv_cache_groups:
        if not isinstance(group.kv_cache_spec, FullAttentionSpec):
            continue
        for name in group.layer_names:
            cache = getattr(layers.get(name), "kv_cache", None)
            if not isinstance(cache, torch.Tensor):
                continue
            pages = cache.shape[0] // config.num_blocks
            for block in block_ids:
                cache[block * pages : (block + 1) * pages].zero_()


def expand_batch_to_tokens(
    x: torch.Tensor,
    cu_num_tokens: torch.Tensor,
    num_tokens: int,
    replace_from: int = 0,
    replace_to: int = 0,
) -> torch.Tensor:
    """What vLLM's function of this name says: each x [batch] as often as its request has tokens,
    `replace_from` among them as `replace_to`; [num_tokens].

    cu_num_tokens  [batch]: tokens of the requests up to each, that one included
    """
    counts = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
    replaced = x.masked_fill(x == replace_from, replace_to)
    return replaced.repeat_interleave(counts, output_size=num_tokens)


def limit_drafts(
    logits: torch.Tensor, k: torch.Tensor | None, p: torch.Tensor | None
) -> torch.Tensor:
    """vLLM's `apply_top_k_top_p` for logits [T, vocab] of drafted tokens, of which T may be 0."""
    limited: torch.Tensor = apply_top_k_top_p(logits, k, p) if len(logits) else logits
    return limited


def keep_generators(runner: Any) -> None:
    """Make the thrown-away draws of vLLM's CPU model `runner` leave no trace in its generators.

    What a request with a seed answers then does not depend on how its prompt was cut.
    """
    sample, bookkeeping = runner._sample, runner._bookkeeping_sync

    def thrown_away() -> list[int]:
        generators = runner.input_batch.generators
        return [row for row in generators if runner.discard_request_mask.np[row]]

    @functools.wraps(sample)
    def sample_and_restore(*args: Any, **kwargs: Any) -> Any:
        kept = [runner.input_batch.generators[row] for row in thrown_away()]
        states = [generator.get_state() for generator in kept]
        output = sample(*args, **kwargs)
        for generator, state in zip(kept, states, strict=True):
            generator.set_state(state)
        return output

    @functools.wraps(bookkeeping)
    def bookkeeping_without_them(*args: Any, **kwargs: Any) -> Any:
        batch = runner.input_batch
        everyone, hidden = batch.generators, thrown_away()
        batch.generators = {row: g for row, g in everyone.items() if row not in hidden}
        try:
            return bookkeeping(*args, **kwargs)
        finally:
            batch.generators = everyone

    runner._sample, runner._bookkeeping_sync = sample_and_restore, bookkeeping_without_them
