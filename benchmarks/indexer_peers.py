# SPDX-License-Identifier: Apache-2.0
"""Other projects' indexer logits and top-k kernels, as vLLM 0.26 ships and calls them."""

from collections.abc import Callable

import torch
from mla_kernels.layouts import BLOCK_SIZE
from mla_kernels.testing.indexer_case import IndexerCase

Run = Callable[[], torch.Tensor]
WORKSPACE_BYTES = 2**20
COOPERATIVE_ROWS = 32


def deepgemm_logits(case: IndexerCase) -> Run:
    """DeepGEMM's fp8 paged logits, its schedule computed once."""
    from vllm.utils.deep_gemm import fp8_fp4_paged_mqa_logits, get_paged_mqa_logits_metadata

    B = len(case.seq_lens)
    q = case.q.view(B, -1, *case.q.shape[1:])
    lengths = case.seq_lens[:, None].contiguous()
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    schedule = get_paged_mqa_logits_metadata(lengths, BLOCK_SIZE, sms)
    cache = case.k_cache.unsqueeze(2)
    width = case.block_table.shape[1] * BLOCK_SIZE

    def run() -> torch.Tensor:
        return fp8_fp4_paged_mqa_logits(
            (q, None), cache, case.weights, lengths, case.block_table, schedule, width, False
        )

    return run


def topk_peers(scores: torch.Tensor, lengths: torch.Tensor, k: int) -> dict[str, Run]:
    """vLLM's three kernels and torch.topk, each into its own output."""
    T, width = scores.shape
    found: dict[str, Run] = {"torch.topk": lambda: torch.topk(scores, k, dim=1).indices}
    try:
        import vllm._custom_ops  # noqa: F401  (registers torch.ops._C)
    except ImportError:
        return found
    outs = [torch.empty(T, k, dtype=torch.int32, device=scores.device) for _ in range(3)]
    workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=scores.device)
    ops = torch.ops._C

    def persistent() -> torch.Tensor:
        ops.persistent_topk(scores, lengths, outs[0], workspace, k, width)
        return outs[0]

    def cooperative() -> torch.Tensor:
        ops.cooperative_topk(scores, lengths, outs[1], workspace, k, width)
        return outs[1]

    def per_row() -> torch.Tensor:
        strides = (scores.stride(0), scores.stride(1))
        ops.top_k_per_row_decode(scores, 1, lengths, outs[2], T, *strides, k)
        return outs[2]

    found["vllm/persistent"] = persistent
    found["vllm/per_row"] = per_row
    if T <= COOPERATIVE_ROWS:
        found["vllm/cooperative"] = cooperative
    return found
