# SPDX-License-Identifier: Apache-2.0
"""Other projects' dense MLA decode kernels, as vLLM 0.26 ships and calls them."""

from collections.abc import Callable

import torch
from dense_cases import LATENT, PAGE, SCALE, Batch

Run = Callable[[], torch.Tensor]


def flashmla(batch: Batch) -> Run | None:
    """FlashMLA's dense kernel: bf16 only."""
    if batch.shape.cache != "bf16":
        return None
    from vllm.third_party.flashmla.flash_mla_interface import (
        flash_mla_with_kvcache,
        get_mla_metadata,
    )

    metadata, _ = get_mla_metadata()
    cache = batch.kv_cache.unsqueeze(2)

    def run() -> torch.Tensor:
        return flash_mla_with_kvcache(
            batch.q,
            cache,
            batch.block_table,
            batch.seq_lens,
            LATENT,
            metadata,
            softmax_scale=SCALE,
            causal=True,
        )[0]

    return run


def flashmla_fp8(batch: Batch) -> Run | None:
    """FlashMLA's dense kernel for per-tensor fp8 caches. It multiplies in fp8: q, rounded to e4m3
    beforehand as vLLM's layer does, and the softmax weights have 4 significant bits."""
    if batch.shape.cache != "fp8":
        return None
    from vllm.v1.attention.ops.flashmla import (
        flash_mla_with_kvcache_fp8,
        get_mla_metadata_dense_fp8,
    )

    _, s_q, H, _ = batch.q.shape
    metadata, num_splits = get_mla_metadata_dense_fp8(batch.seq_lens, s_q * H, 1)
    q = batch.q.to(torch.float8_e4m3fn)
    cache = batch.kv_cache.unsqueeze(2)
    q_scale = torch.ones(1, device=q.device)
    kv_scale = torch.full((1,), batch.kv_scale or 1.0, device=q.device)

    def run() -> torch.Tensor:
        return flash_mla_with_kvcache_fp8(
            q,
            cache,
            batch.block_table,
            batch.seq_lens,
            LATENT,
            metadata,
            num_splits,
            softmax_scale=SCALE,
            causal=True,
            descale_q=q_scale,
            descale_k=kv_scale,
        )[0]

    return run


def flash_attention_3(batch: Batch) -> Run | None:
    """FlashAttention-3 with q_v (the absorbed form), its schedule computed once: bf16 only."""
    if batch.shape.cache != "bf16":
        return None
    from vllm.vllm_flash_attn.flash_attn_interface import (
        flash_attn_varlen_func,
        get_scheduler_metadata,
    )

    B, s_q, H, _ = batch.q.shape
    q_latent, q_rope = batch.q.flatten(0, 1).split([LATENT, batch.q.shape[-1] - LATENT], dim=-1)
    q_rope = q_rope.contiguous()
    q_latent = q_latent.contiguous()
    latent = batch.kv_cache[..., :LATENT].unsqueeze(2)
    rope = batch.kv_cache[..., LATENT:].unsqueeze(2)
    starts = torch.arange(0, (B + 1) * s_q, s_q, dtype=torch.int32, device=batch.q.device)
    longest = max(batch.shape.lengths)
    schedule = get_scheduler_metadata(
        batch_size=B,
        max_seqlen_q=s_q,
        max_seqlen_k=longest,
        num_heads_q=H,
        num_heads_kv=1,
        headdim=rope.shape[-1],
        cache_seqlens=batch.seq_lens,
        qkv_dtype=torch.bfloat16,
        headdim_v=LATENT,
        page_size=PAGE,
        cu_seqlens_q=starts,
        causal=True,
        num_splits=0,
    )

    def run() -> torch.Tensor:
        out = flash_attn_varlen_func(
            q=q_rope,
            k=rope,
            v=latent,
            q_v=q_latent,
            max_seqlen_q=s_q,
            cu_seqlens_q=starts,
            max_seqlen_k=longest,
            seqused_k=batch.seq_lens,
            block_table=batch.block_table,
            softmax_scale=SCALE,
            causal=True,
            fa_version=3,
            scheduler_metadata=schedule,
        )
        return out.view(B, s_q, H, LATENT)

    return run


def vllm_triton(batch: Batch) -> Run | None:
    """vLLM's Triton MLA: one new token a request, bf16 or per-tensor fp8."""
    if batch.shape.s_q != 1 or batch.shape.cache == "fp8_ds_mla":
        return None
    from vllm.v1.attention.backends.mla.triton_mla import _compute_num_kv_splits
    from vllm.v1.attention.ops.triton_decode_attention import decode_attention_fwd

    B, _, H, _ = batch.q.shape
    device = batch.q.device
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    splits = _compute_num_kv_splits(max(batch.shape.lengths), sms)
    q = batch.q[:, 0]
    cache = batch.kv_cache.unsqueeze(2)
    out = torch.zeros(B, H, LATENT, dtype=q.dtype, device=device)
    lse = torch.zeros(B, H, dtype=q.dtype, device=device)
    partial = torch.empty(B, H, splits, LATENT + 1, dtype=torch.float32, device=device)
    scale = torch.tensor(batch.kv_scale or 1.0, dtype=torch.float32, device=device)

    def run() -> torch.Tensor:
        decode_attention_fwd(
            q,
            cache,
            cache[..., :LATENT],
            out,
            lse,
            batch.block_table,
            batch.seq_lens,
            partial,
            splits,
            SCALE,
            PAGE,
            k_scale=scale,
            v_scale=scale,
            is_mla=True,
        )
        return out.unsqueeze(1)

    return run


PEERS: dict[str, Callable[[Batch], Run | None]] = {
    "peer/flashmla": flashmla,
    "peer/flashmla_fp8": flashmla_fp8,
    "peer/fa3": flash_attention_3,
    "peer/vllm_triton": vllm_triton,
}
