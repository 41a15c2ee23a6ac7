# SPDX-License-Identifier: Apache-2.0
"""Refusals by the names of FlashMLA's arguments, where the ops would give those of their own."""

import torch

from mla_kernels import checks
from mla_kernels.decode.api import MAX_HEADS
from mla_kernels.flash_mla.shapes import as_blocks
from mla_kernels.layouts import Fp8DsMlaLayout, MlaDims


def check_decode(
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
        check_beside(q, "indices", indices, (B, s_q, "topk"), torch.int32)
        check_beside(q, "topk_length", topk_length, (B,), torch.int32)
        check_beside(q, "attn_sink", attn_sink, (H,), torch.float32)
    else:
        for name, given in (("attn_sink", attn_sink), ("topk_length", topk_length)):
            if given is not None:
                raise ValueError(f"Expected {name} with indices only, got it and indices=None")
        for name, given in (("block_table", block_table), ("cache_seqlens", cache_seqlens)):
            if given is None:
                raise ValueError(f"Expected {name} where there are no indices, got None")
        checks.check_range("s_q (q.shape[1])", s_q, 1, 2**31 - 1)
        check_beside(q, "block_table", block_table, (B, "max_blocks"), torch.int32)
        check_beside(q, "cache_seqlens", cache_seqlens, (B,), torch.int32)
    check_out(q, out, (B, s_q, H, head_dim_v))


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
    checks.check_kv_cache(as_blocks(rows) if sparse else rows, dims, None, "k_cache")


def check_beside(
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


def check_out(q: torch.Tensor, out: torch.Tensor | None, shape: tuple[int, ...]) -> None:
    if out is None:
        return
    checks.check_shape("out", out, shape)
    checks.check_written("out", out)
    checks.check_contiguous("out", out)
    check_beside(q, "out", out, shape, q.dtype)
