# SPDX-License-Identifier: Apache-2.0
"""Decode attention over a paged cache, dense or sparse."""

from collections.abc import Sequence

import torch

from mla_kernels import checks
from mla_kernels.decode.api import MAX_S_Q, mla_decode
from mla_kernels.decode.plan.api import MlaDecodePlan, plan_mla_decode
from mla_kernels.flash_mla.arguments import check_decode
from mla_kernels.flash_mla.metadata import FlashMLASchedMeta
from mla_kernels.flash_mla.shapes import as_blocks, lonely_to_inf
from mla_kernels.sparse.api import mla_sparse_attention
from mla_kernels.torch_modes import untraced
from mla_kernels.triton_common.record import kind


@untraced
def flash_mla_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor | None,
    cache_seqlens: torch.Tensor | None,
    head_dim_v: int,
    tile_scheduler_metadata: FlashMLASchedMeta,
    num_splits: None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool = False,
    indices: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    extra_k_cache: torch.Tensor | None = None,
    extra_indices_in_kvcache: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    extra_topk_length: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Decode attention over a paged cache: dense, or with `indices` sparse.

    q               [B, s_q, H, Dk]
    k_cache         [num_blocks, block_size, 1, Dk], or with is_fp8_kvcache fp8_ds_mla rows
                    [num_blocks, block_size, 1, 656] as uint8, int8 or float8_e4m3fn. block_size
                    16, 32, 64 or 128; with indices any, if the blocks lie one behind the other and
                    have a multiple of 16 rows in all
    block_table     [B, max_blocks] int32 and cache_seqlens [B] int32: dense only
    softmax_scale   1 / sqrt(Dk) if None
    indices         [B, s_q, topk] int32 = block * block_size + offset, -1 = none
    topk_length     [B] int32: only the leftmost of a request's indices are used
    attn_sink       [H] fp32, sparse only: see `mla_sparse_attention`
    out             [B, s_q, H, head_dim_v] contiguous, to write into

    Returns (out [B, s_q, H, head_dim_v], lse [B, H, s_q] fp32, +inf for a row without a key).
    ValueError for what FlashMLA asserts, and for extra_k_cache, which is not supported.
    """
    if not isinstance(tile_scheduler_metadata, FlashMLASchedMeta):
        raise ValueError(
            "Expected tile_scheduler_metadata from mla_kernels.flash_mla.get_mla_metadata, got "
            f"{type(tile_scheduler_metadata).__name__}"
        )
    if num_splits is not None:
        raise ValueError(f"Expected num_splits=None, got {num_splits!r}")
    extras = {
        "extra_k_cache": extra_k_cache,
        "extra_indices_in_kvcache": extra_indices_in_kvcache,
        "extra_topk_length": extra_topk_length,
    }
    for name, extra in extras.items():
        if extra is not None:
            raise ValueError(f"Expected no {name} (not supported), got {type(extra).__name__}")
    meta = tile_scheduler_metadata
    tensors = q, k_cache, block_table, cache_seqlens, indices, attn_sink, topk_length, out
    modes = head_dim_v, softmax_scale, causal, is_fp8_kvcache
    kinds = *map(kind, tensors), *map(kind, modes)
    if kinds != meta.checked:
        check_decode(*tensors, *modes)
    scale = q.shape[3] ** -0.5 if softmax_scale is None else softmax_scale
    kv_cache = k_cache.squeeze(2)
    if is_fp8_kvcache:
        kv_cache = kv_cache.view(torch.uint8)
    topk = None if indices is None else indices.shape[2]
    shape = (*q.shape, *k_cache.shape[1:], head_dim_v, causal, is_fp8_kvcache, topk)
    if meta.shape not in (None, shape):
        raise ValueError(
            f"Expected the shapes and mode that the metadata was first used with, {meta.shape}, "
            f"got {shape}"
        )
    if indices is not None:
        result, lse = _sparse(q, kv_cache, indices, topk_length, attn_sink, scale, head_dim_v, out)
    else:
        assert block_table is not None and cache_seqlens is not None  # checked above
        if q.device.type == "cpu":  # where `mla_decode` refuses them too, by its own names
            num_blocks, block_size = k_cache.shape[:2]
            checks.check_contents(
                block_table, cache_seqlens, num_blocks, block_size, "cache_seqlens"
            )
        result, lse, meta.plans = _dense(
            q, kv_cache, block_table, cache_seqlens, scale, head_dim_v, causal, meta.plans, out
        )
    # Only now: what was refused leaves the metadata as it was.
    meta.shape, meta.checked = shape, kinds
    return result, lonely_to_inf(lse).transpose(1, 2)


def _sparse(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    indices: torch.Tensor,
    topk_length: torch.Tensor | None,
    attn_sink: torch.Tensor | None,
    scale: float,
    head_dim_v: int,
    out: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse [B, s_q, H]) of `mla_sparse_attention`, to which a row is a token."""
    B, s_q, H, _ = q.shape
    result, lse = mla_sparse_attention(
        q.flatten(0, 1),
        as_blocks(kv_cache),
        indices.flatten(0, 1),
        scale=scale,
        kv_lora_rank=head_dim_v,
        lengths=None if topk_length is None else topk_length.repeat_interleave(s_q),
        sink=attn_sink,
        out=None if out is None else out.view(B * s_q, H, head_dim_v),
    )
    return result.view(B, s_q, H, head_dim_v), lse.view(B, s_q, H)


def _dense(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    scale: float,
    head_dim_v: int,
    causal: bool,
    plans: Sequence[MlaDecodePlan],
    out: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, Sequence[MlaDecodePlan]]:
    """(out, lse [B, s_q, H], plans) of `mla_decode`, which takes MAX_S_Q new tokens a call."""
    s_q, H, Dk = q.shape[1:]
    results: list[tuple[torch.Tensor, torch.Tensor]] = []
    used: list[MlaDecodePlan] = []
    for i, start in enumerate(range(0, s_q, MAX_S_Q)):
        tokens = q[:, start : start + MAX_S_Q]
        if s_q > MAX_S_Q:  # the Hopper kernel takes no strides, the one that does is slower
            tokens = tokens.contiguous()
        later = s_q - start - tokens.shape[1]
        lengths = (cache_seqlens - later).clamp_(min=0) if causal and later else cache_seqlens
        plan = plans[i] if plans else plan_mla_decode(
            lengths,
            num_heads=H,
            s_q=tokens.shape[1],
            kv_lora_rank=head_dim_v,
            rope_dim=Dk - head_dim_v,
            dtype=q.dtype,
            kv_cache_dtype=kv_cache.dtype,
            block_size=kv_cache.shape[1],
            lender=used[0] if used else None,  # one after another, they need no more than one
        )  # fmt: skip
        used.append(plan)
        results.append(
            mla_decode(
                tokens,
                kv_cache,
                block_table,
                lengths,
                scale=scale,
                kv_lora_rank=head_dim_v,
                causal=causal,
                plan=plan,
                out=out if s_q <= MAX_S_Q else None,
            )
        )
    if len(results) == 1:
        return *results[0], used
    outs, sums = zip(*results, strict=True)
    if out is None:  # without one autocast refuses 16-bit floats that are not its own
        out = q.new_empty(*q.shape[:3], head_dim_v)
    return torch.cat(outs, 1, out=out), torch.cat(sums, 1), used
