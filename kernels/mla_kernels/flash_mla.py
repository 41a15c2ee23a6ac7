# SPDX-License-Identifier: Apache-2.0
"""FlashMLA's public functions on this package's kernels: `from mla_kernels import flash_mla`.

Names, argument orders, shapes and return values are those of DeepSeek's `flash_mla` package; what
runs is `mla_decode` and `mla_sparse_attention`, so any device will do. docs/flash_mla.md says where
the two differ. Dense prefill with separate keys and values (`flash_attn_varlen_*`) is not here.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mla_kernels import checks
from mla_kernels.decode.api import MAX_HEADS, MAX_S_Q, mla_decode
from mla_kernels.decode.plan.api import MlaDecodePlan, plan_mla_decode
from mla_kernels.layouts import Fp8DsMlaLayout, MlaDims
from mla_kernels.sparse.api import mla_sparse_attention
from mla_kernels.torch_modes import untraced
from mla_kernels.triton_common.record import kind

__all__ = [
    "FlashMLASchedMeta",
    "flash_mla_sparse_fwd",
    "flash_mla_with_kvcache",
    "get_mla_metadata",
]


_PAGE = 16
_PAGES = (64, 32, 16)  # of a cache with blocks of another size, the largest that fits


@dataclass
class FlashMLASchedMeta:
    """What calls with the same shapes and lengths share, so the layers of one step; take a new one
    for other lengths. Filled by the first call."""

    shape: tuple[object, ...] | None = None
    plans: Sequence[MlaDecodePlan] = ()  # dense: one for every MAX_S_Q new tokens
    checked: tuple[object, ...] | None = None  # the kinds of arguments of the last call


@untraced
def get_mla_metadata(*args: object, **kwargs: object) -> tuple[FlashMLASchedMeta, None]:
    """An empty `FlashMLASchedMeta` for `flash_mla_with_kvcache`, and None for `num_splits`.

    Takes the arguments of older versions and, like the current one, needs none of them.
    """
    return FlashMLASchedMeta(), None


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
        _check_decode(*tensors, *modes)
    scale = q.shape[3] ** -0.5 if softmax_scale is None else softmax_scale
    kv_cache = k_cache.squeeze(2)
    if is_fp8_kvcache:
        kv_cache = kv_cache.view(torch.uint8)
    topk = None if indices is None else indices.shape[2]
    shape = (*q.shape, *k_cache.shape[1:], causal, is_fp8_kvcache, topk)
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
    return result, _lonely_to_inf(lse).transpose(1, 2)


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
        _as_blocks(kv_cache),
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


@untraced
def flash_mla_sparse_fwd(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    sm_scale: float,
    d_v: int = 512,
    attn_sink: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    indexer_topk: int | None = 0,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sparse prefill: every query token attends to the rows of `kv` that its indices name.

    q            [s_q, H, Dk]
    kv           [s_kv, 1, Dk]
    indices      [s_q, 1, topk] int32; -1 or a number >= s_kv is none
    topk_length  [s_q] int32: only the leftmost indices are used
    indexer_topk 0 or None: FlashMLA's second log-sum-exp, over so many indices, is not supported
    out          [s_q, H, d_v] contiguous, to write into

    Returns (out [s_q, H, d_v], max_logits [s_q, H], lse [s_q, H]): of each row the largest scaled
    score (-inf without a key) and the log-sum-exp (natural; +inf without a key), the sink left out.
    """
    if isinstance(indexer_topk, torch.Tensor):  # in vLLM's copy out is in this place
        raise ValueError(
            f"Expected indexer_topk=0 in the 8th place, got tensor {list(indexer_topk.shape)}: "
            "out goes by name"
        )
    if indexer_topk not in (None, 0):
        raise ValueError(f"Expected indexer_topk=0 (no other is supported), got {indexer_topk!r}")
    checks.check_shape("q", q, ("s_q", "H", "Dk"))
    checks.check_dtype("q", q, checks.FLOAT_DTYPES)
    s_q, H, Dk = q.shape
    checks.check_range("number of heads (q.shape[1])", H, 1, MAX_HEADS)
    checks.check_range("d_v", d_v, 1, Dk - 1)
    checks.check_scale(sm_scale, "sm_scale")
    for name, x in (("kv", kv), ("indices", indices)):
        checks.check_tensor(name, x)
    _check_beside(q, "kv", kv, ("s_kv", 1, Dk), q.dtype)
    checks.check_range("s_kv (kv.shape[0])", kv.shape[0], 1, 2**31 - 1)
    _check_beside(q, "indices", indices, (s_q, 1, "topk"), torch.int32)
    _check_beside(q, "topk_length", topk_length, (s_q,), torch.int32)
    _check_beside(q, "attn_sink", attn_sink, (H,), torch.float32)
    _check_out(q, out, (s_q, H, d_v))
    rows = kv.squeeze(1)
    pages, slots = _as_pages(rows), indices.squeeze(1)
    if pages.shape[0] * _PAGE > rows.shape[0]:  # what lies past the copied rows is no key
        slots = torch.where(slots < rows.shape[0], slots, -1)
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


def _check_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor | None,
    cache_seqlens: torch.Tensor | None,
    indices: torch.Tensor | None,
    attn_sink: torch.Tensor | None,
    topk_length: torch.Tensor | None,
    out: torch.Tensor | None,
    head_dim_v: int,
    softmax_scale: float | None,
    causal: bool,
    is_fp8_kvcache: bool,
) -> None:
    """What the ops of this package would refuse too, but by the names of their own arguments."""
    checks.check_shape("q", q, ("B", "s_q", "H", "Dk"))
    checks.check_dtype("q", q, checks.FLOAT_DTYPES)
    B, s_q, H, Dk = q.shape
    checks.check_range("number of heads (q.shape[2])", H, 1, MAX_HEADS)
    checks.check_range("head_dim_v", head_dim_v, 1, Dk - 1)
    if softmax_scale is not None:
        checks.check_scale(softmax_scale, "softmax_scale")
    checks.check_flags(causal=causal, is_fp8_kvcache=is_fp8_kvcache)
    _check_cache(k_cache, q, head_dim_v, is_fp8_kvcache, indices is not None)
    if indices is not None:
        if causal:
            raise ValueError(f"Expected causal=False with indices, got {causal!r}")
        _check_beside(q, "indices", indices, (B, s_q, "topk"), torch.int32)
        _check_beside(q, "topk_length", topk_length, (B,), torch.int32)
        _check_beside(q, "attn_sink", attn_sink, (H,), torch.float32)
    else:
        for name, given in (("attn_sink", attn_sink), ("topk_length", topk_length)):
            if given is not None:
                raise ValueError(f"Expected {name} with indices only, got it and indices=None")
        for name, given in (("block_table", block_table), ("cache_seqlens", cache_seqlens)):
            if given is None:
                raise ValueError(f"Expected {name} where there are no indices, got None")
        checks.check_range("s_q (q.shape[1])", s_q, 1, 2**31 - 1)
        _check_beside(q, "block_table", block_table, (B, "max_blocks"), torch.int32)
        _check_beside(q, "cache_seqlens", cache_seqlens, (B,), torch.int32)
    _check_out(q, out, (B, s_q, H, head_dim_v))


def _check_cache(
    k_cache: torch.Tensor, q: torch.Tensor, head_dim_v: int, is_fp8_kvcache: bool, sparse: bool
) -> None:
    dims = MlaDims(head_dim_v, q.shape[3] - head_dim_v)
    fp8_dtypes = (torch.uint8, torch.int8, torch.float8_e4m3fn)
    checks.check_dtype("k_cache", k_cache, fp8_dtypes if is_fp8_kvcache else (q.dtype,))
    width = dims.head_dim
    if is_fp8_kvcache:
        group = Fp8DsMlaLayout.group_size
        if head_dim_v % group:
            raise ValueError(
                f"Expected head_dim_v to be a multiple of {group} with is_fp8_kvcache, "
                f"got {head_dim_v}"
            )
        width = Fp8DsMlaLayout(dims).row_bytes
    checks.check_shape("k_cache", k_cache, ("num_blocks", "block_size", 1, width))
    checks.check_device("k_cache", k_cache, q.device)
    rows = k_cache.squeeze(2)
    rows = rows.view(torch.uint8) if is_fp8_kvcache else rows
    checks.check_kv_cache(_as_blocks(rows) if sparse else rows, dims, None, "k_cache")


def _check_beside(
    q: torch.Tensor,
    name: str,
    x: torch.Tensor | None,
    shape: tuple[int | str, ...],
    dtype: torch.dtype,
) -> None:
    """An argument, if given: that shape and dtype, q's device, a contiguous last dimension."""
    if x is None:
        return
    checks.check_shape(name, x, shape)
    checks.check_dtype(name, x, (dtype,))
    checks.check_last_contiguous(name, x)
    checks.check_device(name, x, q.device)


def _check_out(q: torch.Tensor, out: torch.Tensor | None, shape: tuple[int, ...]) -> None:
    if out is None:
        return
    checks.check_shape("out", out, shape)
    checks.check_contiguous("out", out)
    _check_beside(q, "out", out, shape, q.dtype)


def _as_blocks(kv_cache: torch.Tensor) -> torch.Tensor:
    """A cache of sparse decode, whose indices are numbers of rows, by a view in blocks of a size
    that the kernels have. ValueError if that would take a copy or other numbers."""
    num_blocks, block_size, width = kv_cache.shape
    if block_size in checks.BLOCK_SIZES:
        return kv_cache
    rows = num_blocks * block_size
    page = next((page for page in _PAGES if rows % page == 0), None)
    adjacent = min(num_blocks, block_size) <= 1 or (
        kv_cache.stride(0) == block_size * kv_cache.stride(1)
    )
    if page is None or not adjacent:
        raise ValueError(
            f"Expected block size (k_cache.shape[1]) in {list(checks.BLOCK_SIZES)}, or blocks one "
            f"behind the other with a multiple of {_PAGE} rows in all, got {num_blocks} blocks of "
            f"{block_size} with strides {kv_cache.stride()}"
        )
    return kv_cache.view(rows // page, page, width)


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
