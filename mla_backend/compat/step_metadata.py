# SPDX-License-Identifier: Apache-2.0
"""What vLLM says of a step, put right: contexts of prompts, lengths, which requests it has."""

import functools
import inspect
import re
from collections.abc import Callable, Sequence
from typing import Any

from mla_backend.compat import versions

# Who makes up a step: of both model runners, and of the second as expert parallelism is scaled
# (0.32), when all of them write to the block that no request has.
MAKERS = ("_dummy_run", "warmup_kernels")
# Of a layer's name, which may have another number behind it: LongCat has two attentions a layer.
_LAYER = re.compile(r"\blayers\.(\d+)\.")


def skip_chunked_context_metadata() -> None:
    """On CPU, keep vLLM's metadata builder from describing contexts chunk by chunk.

    vLLM 0.26 and 0.27 allocate that description in pinned memory, which a CPU build of torch
    refuses. Only their CUDA prefill reads it, and no other MLA backend runs on a CPU in them.
    """
    if not versions.before((0, 28)):
        return
    from vllm.model_executor.layers.attention import mla_attention

    mla_attention.build_mla_chunked_context_metadata = lambda **_: None


def merge_every_context(prefill: Any, cached_tokens: Callable[[], Any]) -> None:
    """Have vLLM merge the attention of all prompts of a step with that of their cached context.

    prefill        vLLM's MLACommonPrefillMetadata
    cached_tokens  [R] of each prompt, a numpy array; asked for if it matters

    0.26 and 0.27 count how many prompts have a context and take the leading ones for them, as their
    first model runner orders a step. The second, which they take for DeepSeek-V2 and dense models,
    orders by new tokens: prompts behind a shorter new one then lose what they had cached. On it
    tokens were seen to be wrong, with vLLM's own backends too.
    """
    chunked = prefill.chunked_context
    if getattr(chunked, "prefill_tokens_with_context", None) is None:
        return
    cached = cached_tokens() > 0
    if not cached[: cached.sum()].all():
        chunked.prefill_tokens_with_context = None  # all; prompts without a context are masked


def tokens_added_to_drafts(layer_names: Sequence[str], vllm_config: Any) -> int:
    """By how many new tokens of each request a drafter's first step is longer than the model's, for
    `layer_names`: where they are of a draft model of its own, which gets no hidden states and so
    begins with what was sampled, and with parallel drafting, where all drafts are in that step. An
    EAGLE draft makes the first of them in the place of a token of the model's step."""
    speculative = vllm_config.speculative_config
    method = getattr(speculative, "method", None)
    if method not in ("draft_model", "eagle", "eagle3"):
        return 0
    at_once = int(speculative.num_speculative_tokens) if speculative.parallel_drafting else 1
    if method == "draft_model":
        return at_once if all(name.startswith("draft_model.") for name in layer_names) else 0
    return at_once - 1 if at_once > 1 and _follow_the_model(layer_names, vllm_config) else 0


def _follow_the_model(layer_names: Sequence[str], vllm_config: Any) -> bool:
    """Whether all are layers of a draft that is numbered on from the model's last layer."""
    own = vllm_config.model_config.hf_text_config.num_hidden_layers
    found = [_LAYER.search(name) for name in layer_names]
    return all(layer is not None and int(layer[1]) >= own for layer in found)


def bound_lengths(common: Any, added: int) -> Any:
    """vLLM's CommonAttentionMetadata with the `added` tokens of a drafter's first step in the
    host's lengths too, where vLLM does not add them. None is below the number of new tokens.

    A prompt's context would be a token short otherwise, and one of -1 tokens where it begins; from
    0.28 on the engine ends if another prompt of the step has one.
    """
    import torch

    upper, new = common.seq_lens_cpu_upper_bound, common.query_start_loc_cpu.diff()
    if upper is None or not (added or (upper[: len(new)] < new).any()):
        return common
    longer = torch.maximum(upper[: len(new)] + added, new)
    return common.replace(seq_lens_cpu_upper_bound=longer)


def without_padding(common: Any) -> Any:
    """vLLM's CommonAttentionMetadata without the padding that is not that of a CUDA graph of whole
    steps, whose requests all have as many tokens. Our builder counts tokens a request.

    Its second model runner pads so the drafts of several MTP modules, without a request for the
    tokens behind (0.28 and 0.29), and with VLLM_USE_BREAKABLE_CUDAGRAPH=1 (0.26) tokens and
    requests of any step whose graphs end where attention begins.
    """
    import numpy as np

    longest = common.max_query_len
    if longest == 1 and common.num_actual_tokens == common.num_reqs:
        return common  # a step of decode tokens, whether the last requests are padding or not
    starts = common.query_start_loc_cpu.numpy()  # whose operators take a fraction of torch's time
    T, new = int(starts[-1]), np.diff(starts)
    some = new > 0
    if some.all():
        return common.replace(num_actual_tokens=T) if T < common.num_actual_tokens else common
    whole_step = (new[some] == longest).all()
    if whole_step and common.num_actual_tokens == common.num_reqs * longest:
        return common
    if T == 0 or not _pads_requests():
        return common
    B = int(np.flatnonzero(some)[-1]) + 1
    upper = common.seq_lens_cpu_upper_bound  # which vLLM's own `unpadded` leaves out
    cut = common.unpadded(T, B)
    return cut.replace(seq_lens_cpu_upper_bound=None if upper is None else upper[:B])


def _pads_requests() -> bool:
    """Whether vLLM pads the requests of steps whose graphs end where attention begins."""
    if not versions.before((0, 27)):
        return False
    from vllm.compilation.breakable_cudagraph import is_breakable_cudagraph_enabled

    return bool(is_breakable_cudagraph_enabled())


def deal_draft_slots(slots: Callable[[Any, Any, Any, int], Any]) -> None:
    """Under decode context parallelism, have the drafts after the first written where this rank has
    them: slots(positions [B], block_table, rows of it [B], block_size) -> [B].

    The drafters of vLLM's first model runner step on as if one rank had all tokens. Every rank
    would then write the row of each draft, and to a block that may be another request's: no wrong
    tokens, as it is the draft layer's cache, but worse drafts. The second runner knows of ranks.
    """
    import torch
    from vllm.v1.spec_decode import llm_base_proposer

    stock = llm_base_proposer.eagle_step_update_slot_mapping_and_metadata
    stock = getattr(stock, "undealt", stock)

    @functools.wraps(stock)
    def step(
        *,
        block_table_tensor: Any,
        block_size: int,
        out_clamped_positions: Any,
        out_slot_mapping: Any,
        **others: Any,
    ) -> None:
        stock(
            block_table_tensor=block_table_tensor,
            block_size=block_size,
            out_clamped_positions=out_clamped_positions,
            out_slot_mapping=out_slot_mapping,
            **others,
        )
        positions, B = out_clamped_positions, len(out_clamped_positions)
        rows = torch.arange(B, device=positions.device)
        dealt = slots(positions, block_table_tensor, rows, block_size)
        written = out_slot_mapping[:B]
        dealt.masked_fill_(written < 0, -1)  # beyond the model's longest request
        written.copy_(dealt)

    step.undealt = stock  # type: ignore[attr-defined]
    llm_base_proposer.eagle_step_update_slot_mapping_and_metadata = step


def is_dummy_step() -> bool:
    """Whether the step whose metadata is being built was made up by a model runner, for a start-up
    or for a data-parallel rank without requests. Its second one's drafters write their rows of such
    steps to places of requests that are gone (to 0.30)."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_name not in MAKERS:
        frame = frame.f_back
    return frame is not None


def request_ids() -> Sequence[str]:
    """Ids of the requests of the step whose metadata is being built, in its order; () if unknown.

    For messages about faults. vLLM tells its metadata builders no names, so this looks for the
    batch among the callers: its first model runner keeps it as an attribute, the second as a
    variable. A dummy step has no requests, whatever its runner holds.
    """
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_name not in MAKERS:
        names = frame.f_locals
        for holder in (names, getattr(names.get("self"), "__dict__", {})):
            ids = getattr(holder.get("input_batch"), "req_ids", None)
            if ids is not None:
                return [str(name) for name in ids]
        frame = frame.f_back
    return ()
