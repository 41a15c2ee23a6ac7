# SPDX-License-Identifier: Apache-2.0
"""Launching the sparse kernel and its merge. Arguments are checked by `mla_kernels.sparse.api`."""

from typing import Any

import torch
import triton

from mla_kernels import checks
from mla_kernels.arch import Arch
from mla_kernels.decode.query import Query, first_part, joined, tokens_of
from mla_kernels.decode.rescale import scale_to_log2
from mla_kernels.decode.triton.launcher import check_supported, kernel_constants
from mla_kernels.decode.triton.plan import arch_of
from mla_kernels.layouts import MlaDims
from mla_kernels.sparse.triton.few_rows.launcher import launch_few_rows
from mla_kernels.sparse.triton.few_rows.tiles import choose_few_rows
from mla_kernels.sparse.triton.kernel import mla_sparse_kernel
from mla_kernels.sparse.triton.results import launch_merge
from mla_kernels.sparse.triton.tiles import (
    FIXED_WORKSPACE,
    Split,
    Tile,
    choose_split,
    choose_tile,
    fixed_split,
    partial_bytes,
    tokens_at_once,
)
from mla_kernels.triton_common.formats import cache_format
from mla_kernels.triton_common.launch import launch
from mla_kernels.triton_common.runtime import INTERPRET


def mla_sparse_attention_triton(
    q: Query,
    kv_cache: torch.Tensor,
    slots: torch.Tensor,
    *,
    scale: float,
    kv_lora_rank: int,
    kv_scale: float | torch.Tensor | None,
    lengths: torch.Tensor | None,
    sink: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    max_logits: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    deterministic: bool = False,
    tile: Tile | None = None,
    split: Split | None = None,
) -> None:
    """`mla_sparse_attention` into contiguous out and lse. Allocates nothing with a workspace, but
    for parts of q that the kernel for few heads does not serve."""
    T, H = lse.shape
    K, dtype, device = slots.shape[1], out.dtype, out.device
    rope_dim = q.shape[2] - kv_lora_rank if isinstance(q, torch.Tensor) else q[1].shape[2]
    dims = MlaDims(kv_lora_rank, rope_dim)
    check_supported(first_part(q), out, dims)
    if T == 0:
        return
    kv_format = cache_format(kv_cache.dtype)
    arch = arch_of(device)
    few_rows = None
    # Gluon has no interpreter.
    if tile is None and max_logits is None and not INTERPRET and checks.rows_aligned(kv_cache):
        few_rows = choose_few_rows(H, dims, kv_format, arch, dtype)
    if split is None and deterministic:
        split = fixed_split(K)
        room = FIXED_WORKSPACE if workspace is None else workspace.numel()
        turn = tokens_at_once(H, split.splits, kv_lora_rank, room) if split.splits > 1 else T
        if 0 < turn < T:
            for part in (slice(t, t + turn) for t in range(0, T, turn)):
                mla_sparse_attention_triton(
                    tokens_of(q, part),
                    kv_cache,
                    slots[part],
                    scale=scale,
                    kv_lora_rank=kv_lora_rank,
                    kv_scale=kv_scale,
                    lengths=None if lengths is None else lengths[part],
                    sink=sink,
                    out=out[part],
                    lse=lse[part],
                    max_logits=None if max_logits is None else max_logits[part],
                    workspace=workspace,
                    tile=tile,
                    split=split,
                )
            return
    tile = tile or choose_tile(H, kv_format, arch, half=dtype == torch.float16)
    split = split or choose_split(T, H, K, few_rows or tile, device)
    acc, sums = lse, lse
    if split.splits > 1:
        needed = partial_bytes(T, H, split.splits, kv_lora_rank)
        if workspace is None:
            workspace = torch.empty(needed, dtype=torch.uint8, device=device)
        if workspace.numel() < needed:
            raise ValueError(f"Expected workspace of {needed} bytes, got {workspace.numel()}")
        floats = workspace[:needed].view(torch.float32)
        acc, sums = floats.split([T * split.splits * H * n for n in (kv_lora_rank, 2)])
        if max_logits is not None:
            max_logits.fill_(-torch.inf)
    if few_rows is not None:
        launch_few_rows(
            q, kv_cache, slots, out, lse, acc, sums, few_rows, split, arch,
            scale=scale, lengths=lengths, sink=sink,
        )  # fmt: skip
    else:
        launch_sparse(
            joined(q), kv_cache, slots, out, lse, max_logits, acc, sums, tile, split, arch,
            scale=scale, kv_scale=kv_scale, lengths=lengths, sink=sink, dims=dims,
        )  # fmt: skip
    if split.splits > 1:
        launch_merge(acc, sums, sink, out, lse, split.splits, arch)


def launch_sparse(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    slots: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    max_logits: torch.Tensor | None,
    acc: torch.Tensor,
    sums: torch.Tensor,
    tile: Tile,
    split: Split,
    arch: Arch,
    *,
    scale: float,
    kv_scale: float | torch.Tensor | None,
    lengths: torch.Tensor | None,
    sink: torch.Tensor | None,
    dims: MlaDims,
) -> None:
    """One program a token, tile of its heads and range of its slots: the kernel of kernel.py."""
    T, H, _ = q.shape
    kv_format = cache_format(kv_cache.dtype)
    kv, scale_view, rope_view = kv_cache, kv_cache, kv_cache
    if kv_format == "fp8":
        kv = kv_cache.view(torch.uint8)
    elif kv_format == "fp8_ds_mla":
        scale_view, rope_view = kv_cache.view(torch.float32), kv_cache.view(torch.bfloat16)
    launch(
        mla_sparse_kernel,
        (T * triton.cdiv(H, tile.rows), split.splits),
        q,
        kv,
        scale_view,
        rope_view,
        1.0 if kv_scale is None else kv_scale,
        slots,
        slots if lengths is None else lengths,
        lse if sink is None else sink,
        out,
        lse,
        lse if max_logits is None else max_logits,
        acc,
        sums,
        scale_to_log2(scale),
        q.stride(0),
        q.stride(1),
        kv_cache.stride(0),
        slots.stride(0),
        kv_cache.shape[0] * kv_cache.shape[1],
        slots.shape[1],
        H,
        split.span,
        **kernel_constants(dims, kv_format, kv_cache.shape[1], kv_cache.stride(1)),
        **tile_constants(tile, arch, kv_format, q.dtype),
        LOAD_SCALE=isinstance(kv_scale, torch.Tensor),
        HAS_LENGTHS=lengths is not None,
        HAS_SINK=sink is not None,
        SPLIT=split.splits > 1,
        MAX_LOGITS=max_logits is not None,
        **tile_options(tile),
    )


def tile_constants(tile: Tile, arch: Arch, kv_format: str, dtype: torch.dtype) -> dict[str, Any]:
    """Compile-time arguments that the tile and the GPU decide."""
    # fp16 holds every e4m3 value and costs half a conversion instruction. For wgmma a converted q
    # would take the registers.
    fp16_dots = kv_format == "fp8" and not tile.wgmma
    # fp16 weights have no room above the first tile's maximum.
    fixed = not fp16_dots and dtype != torch.float16
    return {
        "BM": tile.rows,
        "BN": tile.tokens,
        "PARTS": tile.parts,
        "REFERENCE": "first" if fixed else "lazy",
        "FP16_DOTS": fp16_dots,
        "HW_FP8": arch.e4m3_convert and not INTERPRET,
        "WGMMA": tile.wgmma,
        "STAGES": tile.stages,
        "INTERPRET": INTERPRET,
    }


def tile_options(tile: Tile) -> dict[str, int]:
    """Compiler options of the tile."""
    return {
        "num_warps": tile.warps,
        "num_stages": tile.stages,
        "maxnreg": tile.max_registers,
    }
