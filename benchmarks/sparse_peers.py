# SPDX-License-Identifier: Apache-2.0
"""FlashMLA's sparse decode and prefill and FlashAttention-3, as vLLM 0.26 ships and calls them."""

from collections.abc import Callable

import torch
from dense_cases import LATENT, ROPE, SCALE
from sparse_cases import Batch

Run = Callable[[], torch.Tensor]
HEADS = (64, 128)


def flashmla_decode(batch: Batch) -> Run | None:
    """fp8_ds_mla rows, 64 or 128 heads: fewer are padded."""
    if batch.shape.cache != "fp8_ds_mla":
        return None
    from vllm.third_party.flashmla.flash_mla_interface import (
        flash_mla_with_kvcache,
        get_mla_metadata,
    )

    metadata, _ = get_mla_metadata()
    B, H = batch.shape.batch, batch.shape.heads
    q = padded(batch.q).unflatten(0, (B, -1))
    cache = batch.kv_cache.unsqueeze(2)
    slots = batch.slots.unflatten(0, (B, -1))
    lengths = {}  # not passed where there is none: the call stays the one timed so far
    if batch.lengths is not None:  # one a request
        lengths["topk_length"] = batch.lengths.view(B, -1)[:, 0].contiguous()

    def run() -> torch.Tensor:
        out, _ = flash_mla_with_kvcache(
            q,
            cache,
            None,
            None,
            LATENT,
            metadata,
            softmax_scale=SCALE,
            is_fp8_kvcache=True,
            indices=slots,
            **lengths,
        )
        return out.flatten(0, 1)[:, :H]

    return run


def flashmla_prefill(batch: Batch) -> Run | None:
    """bf16 rows, 64 or 128 heads: fewer are padded."""
    if batch.shape.cache != "bf16":
        return None
    from vllm.third_party.flashmla.flash_mla_interface import flash_mla_sparse_fwd

    q = padded(batch.q)
    rows = batch.kv_cache.view(-1, 1, batch.kv_cache.shape[2])
    slots = batch.slots.unsqueeze(1)
    lengths = {} if batch.lengths is None else {"topk_length": batch.lengths}
    return lambda: flash_mla_sparse_fwd(q, rows, slots, SCALE, **lengths)[0][:, : batch.shape.heads]


def flash_attention_3(batch: Batch) -> Run | None:
    """With q_v (the absorbed form), each row of the cache a page of its own, as vLLM's
    FLASH_ATTN_MLA_SPARSE calls it, its default for bf16 rows on sm_90. It takes slots that name
    rows at the front of those of a token."""
    if batch.shape.cache != "bf16" or batch.shape.padding == "half_scattered":
        return None
    from vllm.vllm_flash_attn.flash_attn_interface import flash_attn_varlen_func

    q_latent, q_rope = (part.contiguous() for part in batch.q.split([LATENT, ROPE], dim=-1))
    rows = batch.kv_cache.flatten(0, 1)[:, None, None]
    latent, rope = rows[..., :LATENT], rows[..., LATENT:]
    starts = torch.arange(len(batch.q) + 1, dtype=torch.int32, device=batch.q.device)
    counts = batch.lengths
    if counts is None:
        counts = (batch.slots >= 0).sum(1, dtype=torch.int32)

    def run() -> torch.Tensor:
        out: torch.Tensor = flash_attn_varlen_func(
            q=q_rope,
            k=rope,
            v=latent,
            q_v=q_latent,
            max_seqlen_q=1,
            cu_seqlens_q=starts,
            max_seqlen_k=batch.shape.slots,
            seqused_k=counts,
            block_table=batch.slots,
            softmax_scale=SCALE,
            causal=True,
            fa_version=3,
        )
        return out

    return run


def padded(q: torch.Tensor) -> torch.Tensor:
    """q with zeros up to the next number of heads that FlashMLA takes."""
    heads = next(h for h in HEADS if h >= q.shape[1])
    return torch.nn.functional.pad(q, (0, 0, 0, heads - q.shape[1]))


PEERS: dict[str, Callable[[Batch], Run | None]] = {
    "peer/flashmla": flashmla_decode,
    "peer/flashmla_prefill": flashmla_prefill,
    "peer/fa3": flash_attention_3,
}
