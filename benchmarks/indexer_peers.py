# SPDX-License-Identifier: Apache-2.0
"""Other projects' indexer logits and top-k kernels, as vLLM 0.26 ships and calls them; the logits
as 0.33 does, too."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from indexer_cases import DIM, Batch
from mla_kernels.layouts import BLOCK_SIZE

Run = Callable[[], torch.Tensor]
WORKSPACE_BYTES = 2**20
COOPERATIVE_ROWS = 32


def deepgemm_logits(batch: Batch) -> Run | None:
    """DeepGEMM's fp8 logits; None for a bf16 cache."""
    if batch.shape.cache != "fp8":
        return None
    return prefill_logits(batch) if batch.shape.prefill else paged_logits(batch)


def takes(call: Callable[..., Any], option: str) -> bool:
    return option in inspect.signature(call).parameters


def paged_logits(batch: Batch) -> Run:
    """Of decode rows, from the pages; the schedule is computed once."""
    from vllm.utils import deep_gemm

    case, s_q = batch.case, batch.shape.s_q
    table = case.block_table
    native = getattr(deep_gemm, "native_next_n_supported", lambda s_q: s_q <= 2)
    if not native(s_q):  # each row as a request, as vLLM does then
        table, s_q = table.repeat_interleave(s_q, 0), 1
    q = case.q.unflatten(0, (-1, s_q))
    lengths = batch.lengths.view(-1, s_q)
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    schedule = deep_gemm.get_paged_mqa_logits_metadata(lengths, BLOCK_SIZE, sms)
    cache = case.k_cache.unsqueeze(2)
    logits = deep_gemm.fp8_fp4_paged_mqa_logits
    # From 0.33 on nothing behind the lengths is ever cleaned, and there is no option.
    options = {"clean_logits": False} if takes(logits, "clean_logits") else {}

    def run() -> torch.Tensor:
        sizes = (lengths, table, schedule, batch.shape.keys)
        return logits((q, None), cache, case.weights, *sizes, **options)

    return run


def prefill_logits(batch: Batch) -> Run:
    """Of one request's rows. It reads no pages: vLLM copies the keys out of them in every layer,
    which is done here beforehand and not timed."""
    from vllm.utils.deep_gemm import fp8_fp4_mqa_logits

    case = batch.case
    (table,) = case.block_table
    pages = case.k_cache.flatten(1)[table]
    codes = pages[:, : BLOCK_SIZE * DIM].contiguous().view(torch.float8_e4m3fn).view(-1, DIM)
    scales = pages[:, BLOCK_SIZE * DIM :].contiguous().view(torch.float32).flatten()
    starts = torch.zeros_like(batch.lengths)
    options: dict[str, Any] = {"clean_logits": False}
    if takes(fp8_fp4_mqa_logits, "max_seqlen_k"):  # from 0.33 on: so many columns, from its start
        options = {"max_seqlen_k": batch.shape.keys}
    return lambda: fp8_fp4_mqa_logits(
        (case.q, None), (codes, scales), case.weights, starts, batch.lengths, **options
    )


def topk_peers(
    scores: torch.Tensor, lengths: torch.Tensor, k: int, *, prefill: bool = False
) -> dict[str, Run]:
    """vLLM's three kernels of decode rows, or the one of prefill rows, and torch.topk, each into
    its own output."""
    T, width = scores.shape
    found: dict[str, Run] = {"torch.topk": lambda: torch.topk(scores, k, dim=1).indices}
    try:
        import vllm._custom_ops  # noqa: F401  (registers torch.ops._C)
    except ImportError:
        return found
    # No key has the index -2: what a kernel does not write is seen.
    outs = [torch.full((T, k), -2, dtype=torch.int32, device=scores.device) for _ in range(3)]
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

    if prefill:
        starts, strides = torch.zeros_like(lengths), (scores.stride(0), scores.stride(1))

        def per_prefill_row() -> torch.Tensor:
            ops.top_k_per_row_prefill(scores, starts, lengths, outs[0], T, *strides, k)
            return outs[0]

        return found | {"vllm/per_row": per_prefill_row}
    found["vllm/persistent"] = persistent
    found["vllm/per_row"] = per_row
    if T <= COOPERATIVE_ROWS:
        found["vllm/cooperative"] = cooperative
    return found
