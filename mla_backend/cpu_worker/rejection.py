# SPDX-License-Identifier: Apache-2.0
"""What judges drafted tokens: two functions of vLLM's rejection sampler.

Drafts in a step of which one request is sampled: vLLM's CPU form of `expand_batch_to_tokens` fills
a copy of what it returns, so drafts are judged by temperatures and limits from memory that nobody
wrote, in all requests of the step.

Steps without a draft in an engine that drafts, as that of a prompt is: from vLLM 0.32 on their no
tokens are limited to the top-k of their requests, whose largest k it asks for, and the engine dies.
"""

import torch
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p


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
