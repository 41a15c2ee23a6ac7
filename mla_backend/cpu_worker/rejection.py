# SPDX-License-Identifier: Apache-2.0
"""What judges drafted tokens: three functions of vLLM's rejection sampler on CPUs."""

import functools
from typing import Any

import torch
from vllm.utils import cpu_triton_utils
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p


def reject_padding() -> None:
    """Have vLLM's CPU operator reject drafts of -1, as its Triton kernel does.

    A request with one token in its first step beside drafts (a prompt of one, or cached but for
    one) is padded with them. The operator reads the probability in front of the draft's row, which
    is the last token's of another request, and may accept it: a sampled request then lost its first
    token. Call it before vLLM takes the operator for its kernel; a second time it does nothing.
    """
    stock = cpu_triton_utils._rejection_random_sample_kernel_impl
    if hasattr(stock, "__wrapped__"):
        return

    @functools.wraps(stock)
    def judge(
        output_token_ids: torch.Tensor,
        cu_num_draft_tokens: torch.Tensor,
        draft_token_ids: torch.Tensor,
        draft_probs: torch.Tensor | None,
        target_probs: torch.Tensor,
        bonus_token_ids: torch.Tensor,
        recovered_token_ids: torch.Tensor,
        uniform_probs: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        padding = draft_token_ids < 0
        stock(
            output_token_ids,
            cu_num_draft_tokens,
            draft_token_ids.masked_fill(padding, 0),
            draft_probs,
            target_probs,
            bonus_token_ids,
            recovered_token_ids,
            uniform_probs.masked_fill(padding, torch.inf),
            *args,
            **kwargs,
        )

    cpu_triton_utils._rejection_random_sample_kernel_impl = judge
    # To 0.30 the runner takes a wrapper of it.
    wrapped = getattr(cpu_triton_utils, "rejection_random_sample_kernel", None)
    if wrapped is not None:
        cpu_triton_utils.rejection_random_sample_kernel = type(wrapped)(judge)


def expand_batch_to_tokens(
    x: torch.Tensor,
    cu_num_tokens: torch.Tensor,
    num_tokens: int,
    replace_from: int = 0,
    replace_to: int = 0,
) -> torch.Tensor:
    """What vLLM's function of this name says: each x [batch] as often as its request has tokens,
    `replace_from` among them as `replace_to`; [num_tokens].

    vLLM's CPU form fills a copy of what it returns, so that in a step of which one request is
    sampled the drafts of all requests are judged by temperatures and limits that nobody wrote.

    cu_num_tokens  [batch]: tokens of the requests up to each, that one included
    """
    counts = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
    replaced = x.masked_fill(x == replace_from, replace_to)
    return replaced.repeat_interleave(counts, output_size=num_tokens)


def limit_drafts(
    logits: torch.Tensor, k: torch.Tensor | None, p: torch.Tensor | None
) -> torch.Tensor:
    """vLLM's `apply_top_k_top_p` for logits [T, vocab] of drafted tokens, of which T may be 0.

    It is in steps without a draft of an engine that drafts, as that of a prompt is: from 0.32 on
    the largest k of their requests is asked for, and the engine dies.
    """
    limited: torch.Tensor = apply_top_k_top_p(logits, k, p) if len(logits) else logits
    return limited
