# SPDX-License-Identifier: Apache-2.0
"""Models whose router biases a softmax, some of whose experts pass tokens on as they are: LongCat.

vLLM's routers call an operator and a Triton kernel that a CPU does not have, and the engine dies in
its first step.
"""

import torch


def choose_experts(
    topk_weights: torch.Tensor,
    topk_indices: torch.Tensor,
    token_expert_indices: torch.Tensor,
    gating_output: torch.Tensor,
    renormalize: bool = False,
    e_score_correction_bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """vLLM's `vllm_topk_softmax`: the experts of the largest softmax(gating_output [T, experts]) +
    e_score_correction_bias into topk_indices [T, k], and that softmax into topk_weights [T, k]."""
    scores = gating_output.float().softmax(-1)
    biased = scores if e_score_correction_bias is None else scores + e_score_correction_bias
    topk_indices.copy_(biased.topk(topk_indices.shape[1]).indices)
    topk_weights.copy_(scores.gather(1, topk_indices.long()))
    if renormalize:
        topk_weights /= topk_weights.sum(-1, keepdim=True)
    return topk_weights, topk_indices


def pass_on(
    expert_indices: torch.Tensor,
    expert_scales: torch.Tensor,
    num_experts: int,
    zero_expert_type: str,
    hidden_states: torch.Tensor,
) -> torch.Tensor:
    """vLLM's `zero_experts_compute_triton`: hidden_states [T, width] times the sum of those of
    expert_scales [T, k] whose expert_indices are `num_experts` or more. "identity" is the only
    zero_expert_type that vLLM knows."""
    passed = expert_scales.masked_fill(expert_indices < num_experts, 0.0).sum(-1, keepdim=True)
    return (hidden_states * passed).to(hidden_states.dtype)
