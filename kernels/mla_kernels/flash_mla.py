# SPDX-License-Identifier: Apache-2.0
"""FlashMLA's public functions on this package's kernels: `from mla_kernels import flash_mla`.

Names, argument orders, shapes and return values are those of DeepSeek's `flash_mla` package; what
runs is `mla_decode` and `mla_sparse_attention`, so any device will do. docs/flash_mla.md says where
the two differ. Dense prefill with separate keys and values (`flash_attn_varlen_*`) is not here.
"""

from dataclasses import dataclass

import torch

from mla_kernels import checks
from mla_kernels.decode.api import mla_decode
from mla_kernels.decode.plan import MlaDecodePlan, plan_mla_decode
from mla_kernels.sparse.api import mla_sparse_attention

__all__ = [
    "FlashMLASchedMeta",
    "flash_mla_sparse_fwd",
    "flash_mla_with_kvcache",
    "get_mla_metadata",
]


_PAGE = 16


@dataclass
class FlashMLASchedMeta:
    """What calls with the same shapes and lengths share, so the layers of one step; take a new one
    for other lengths. Filled by the first call."""

    shape: tuple[object, ...] | None = None
    plan: MlaDecodePlan | None = None


def get_mla_metadata(*args: object, **kwargs: object) -> tuple[FlashMLASchedMeta, None]:
    """An empty `FlashMLASchedMeta` for `flash_mla_with_kvcache`, and None for `num_splits`.

    Takes the arguments of older versions and, like the current one, needs none of them.
    """
    return FlashMLASchedMeta(), None


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
                    [num_blocks, block_size, 1, 656] as uint8, int8 or float8_e4m3fn
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
    extras = (extra_k_cache, extra_indices_in_kvcache, extra_topk_length)
    if any(x is not None for x in extras):
        raise ValueError("Expected no extra_k_cache, extra_indices_in_kvcache, extra_topk_length")
    checks.check_shape("q", q, ("B", "s_q", "H", "Dk"))
    B, s_q, H, Dk = q.shape
    checks.check_range("head_dim_v", head_dim_v, 1, Dk - 1)
    checks.check_shape("k_cache", k_cache, ("num_blocks", "block_size", 1, "Dk"))
    kv_cache = k_cache.squeeze(2)
    if is_fp8_kvcache:
        checks.check_dtype("k_cache", k_cache, (torch.uint8, torch.int8, torch.float8_e4m3fn))
        kv_cache = kv_cache.view(torch.uint8)
    else:
        checks.check_dtype("k_cache", k_cache, (q.dtype,))
    topk = None
    if indices is not None:
        checks.check_shape("indices", indices, (B, s_q, "topk"))
        topk = indices.shape[2]
    if out is not None:
        checks.check_shape("out", out, (B, s_q, H, head_dim_v))
        if not out.is_contiguous():
            raise ValueError(f"Expected a contiguous out, got strides {out.stride()}")
    shape = (*q.shape, *k_cache.shape[1:], causal, is_fp8_kvcache, topk)
    meta = tile_scheduler_metadata
    if meta.shape not in (None, shape):
        raise ValueError(
            f"Expected the shapes and mode that the metadata was first used with, {meta.shape}, "
            f"got {shape}"
        )
    scale = Dk**-0.5 if softmax_scale is None else softmax_scale
    if indices is not None:
        if causal:
            raise ValueError("Expected causal=False with indices, got True")
        lengths = None
        if topk_length is not None:
            checks.check_shape("topk_length", topk_length, (B,))
            lengths = topk_length.repeat_interleave(s_q)
        result, lse = mla_sparse_attention(
            q.flatten(0, 1),
            kv_cache,
            indices.flatten(0, 1),
            scale=scale,
            kv_lora_rank=head_dim_v,
            lengths=lengths,
            sink=attn_sink,
            out=None if out is None else out.view(B * s_q, H, head_dim_v),
        )
        result, lse = result.view(B, s_q, H, head_dim_v), lse.view(B, s_q, H)
    else:
        if attn_sink is not None or topk_length is not None:
            raise ValueError("Expected attn_sink and topk_length with indices only")
        if block_table is None or cache_seqlens is None:
            raise ValueError("Expected block_table and cache_seqlens, or indices, got neither")
        plan = meta.plan
        if plan is None:
            plan = plan_mla_decode(
                cache_seqlens,
                num_heads=H,
                s_q=s_q,
                kv_lora_rank=head_dim_v,
                rope_dim=Dk - head_dim_v,
                dtype=q.dtype,
                kv_cache_dtype=kv_cache.dtype,
                block_size=k_cache.shape[1],
            )
        result, lse = mla_decode(
            q,
            kv_cache,
            block_table,
            cache_seqlens,
            scale=scale,
            kv_lora_rank=head_dim_v,
            causal=causal,
            plan=plan,
            out=out,
        )
        meta.plan = plan
    meta.shape = shape  # only now: what was refused leaves the metadata as it was
    return result, _lonely_to_inf(lse).transpose(1, 2)


def flash_mla_sparse_fwd(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    sm_scale: float,
    d_v: int = 512,
    attn_sink: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sparse prefill: every query token attends to the rows of `kv` that its indices name.

    q            [s_q, H, Dk]
    kv           [s_kv, 1, Dk]
    indices      [s_q, 1, topk] int32; -1 or a number >= s_kv is none
    topk_length  [s_q] int32: only the leftmost indices are used

    Returns (out [s_q, H, d_v], max_logits [s_q, H], lse [s_q, H]): of each row the largest scaled
    score (-inf without a key) and the log-sum-exp (natural; +inf without a key), the sink left out.
    """
    checks.check_shape("q", q, ("s_q", "H", "Dk"))
    checks.check_shape("kv", kv, ("s_kv", 1, q.shape[2]))
    checks.check_range("s_kv (kv.shape[0])", kv.shape[0], 1, 2**31 - 1)
    checks.check_shape("indices", indices, (q.shape[0], 1, "topk"))
    checks.check_dtype("indices", indices, (torch.int32,))
    rows = kv.squeeze(1)
    slots = torch.where(indices.squeeze(1) < rows.shape[0], indices.squeeze(1), -1)
    pages = _as_pages(rows)
    max_logits = q.new_empty(q.shape[:2], dtype=torch.float32)
    result, lse = mla_sparse_attention(
        q,
        pages,
        slots,
        scale=sm_scale,
        kv_lora_rank=d_v,
        lengths=topk_length,
        sink=attn_sink,
        out=out,
        max_logits=max_logits,
    )
    return result, max_logits, _lonely_to_inf(lse)


def _as_pages(rows: torch.Tensor) -> torch.Tensor:
    """rows [n, Dk] as a paged cache of 16 rows a block: a view, or a padded copy if 16 does not
    divide n."""
    short = -rows.shape[0] % _PAGE
    if short:
        rows = torch.nn.functional.pad(rows, (0, 0, 0, short))
    return rows.unflatten(0, (-1, _PAGE))


def _lonely_to_inf(lse: torch.Tensor) -> torch.Tensor:
    """FlashMLA's log-sum-exp of no key is +inf."""
    return lse.masked_fill(lse == -torch.inf, torch.inf)
