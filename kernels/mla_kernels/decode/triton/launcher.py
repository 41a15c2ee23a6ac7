# SPDX-License-Identifier: Apache-2.0
"""Launching the decode and merge kernels. Arguments are checked by `mla_kernels.decode.api`."""

from typing import Any

import torch
import triton

from mla_kernels import checks
from mla_kernels.arch import Arch, arch_of
from mla_kernels.decode.call import DecodeCall
from mla_kernels.decode.merge.launcher import launch_merge
from mla_kernels.decode.plan.api import MlaDecodePlan
from mla_kernels.decode.plan.launcher import build_plan
from mla_kernels.decode.query import joined
from mla_kernels.decode.rescale import scale_to_log2
from mla_kernels.decode.triton.few_rows.launcher import launch_few_rows
from mla_kernels.decode.triton.few_rows.tiles import choose_few_rows
from mla_kernels.decode.triton.few_rows_fp8.launcher import launch_few_rows_fp8, takes_few_rows_fp8
from mla_kernels.decode.triton.kernel import mla_decode_kernel
from mla_kernels.decode.triton.many_rows.launcher import launch_many_rows, takes_many_rows
from mla_kernels.decode.triton.parts import parts_and_spare
from mla_kernels.decode.triton.tiles import Tile, choose_tile, tile_rows
from mla_kernels.layouts import Fp8DsMlaLayout, MlaDims
from mla_kernels.triton_common.alignment import row_alignment
from mla_kernels.triton_common.formats import cache_format, cache_views, scale_argument
from mla_kernels.triton_common.launch import launch
from mla_kernels.triton_common.runtime import INTERPRET


def mla_decode_triton(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float,
    kv_lora_rank: int,
    kv_scale: float | torch.Tensor | None,
    causal: bool,
    rescale: str,
    plan: MlaDecodePlan | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    deterministic: bool,
) -> None:
    """`mla_decode` into contiguous out and lse. Allocates nothing when given a plan."""
    _, s_q, H, Dk = q.shape
    dims = MlaDims(kv_lora_rank, Dk - kv_lora_rank)
    checks.check_last_contiguous("q", q)
    device_plan = None if plan is None else plan.device_plan
    if device_plan is None:
        parts, spare = parts_and_spare(s_q * H, q.device, kv_cache.dtype, q.dtype)
        device_plan = build_plan(
            seq_lens,
            num_heads=H,
            s_q=s_q,
            kv_lora_rank=kv_lora_rank,
            deterministic=deterministic,
            max_seq_len=block_table.shape[1] * kv_cache.shape[1],
            num_parts=parts,
            spare=spare,
        )
    arch = arch_of(q.device)
    kv_format = cache_format(kv_cache.dtype)
    few_rows = None
    near = are_near(q) and checks.pages_near(kv_cache)
    if not INTERPRET and checks.rows_aligned(kv_cache) and near:  # Gluon has no interpreter
        few_rows = choose_few_rows(
            tile_rows(s_q * H, arch), dims, kv_format, arch, rescale, kv_cache.shape[1], q.dtype
        )
    call = DecodeCall(
        q, kv_cache, block_table, seq_lens, device_plan, out, lse,
        scale=scale, kv_scale=kv_scale, causal=causal, rescale=rescale,
    )  # fmt: skip
    if not INTERPRET and takes_many_rows(q, kv_cache, dims, arch, rescale):
        launch_many_rows(call)
    elif few_rows is not None and takes_few_rows_fp8(kv_cache, few_rows, arch):
        launch_few_rows_fp8(call, few_rows)
    elif few_rows is not None:
        launch_few_rows(call, few_rows, dims, arch)
    else:
        aligned = row_alignment(kv_cache) == 16
        tile = choose_tile(s_q * H, dims, kv_format, arch, rescale, kv_cache.shape[1], aligned)
        launch_decode(call, tile, dims, arch)
    launch_merge(device_plan, out, lse, arch)


def are_near(q: torch.Tensor) -> bool:
    """Whether the rows of a request lie as near to each other as 32 bits reach: kernels for few of
    them have no registers to spare for wider addresses."""
    _, s_q, H, D = q.shape
    return (s_q - 1) * q.stride(1) + (H - 1) * q.stride(2) + D < 2**31


def launch_decode(call: DecodeCall, tile: Tile, dims: MlaDims, arch: Arch) -> None:
    """One program a row tile and part of the plan."""
    q, kv_cache = joined(call.q), call.kv_cache
    kv_format = cache_format(kv_cache.dtype)
    launch(
        mla_decode_kernel,
        (triton.cdiv(call.rows, tile.rows), call.plan.parts.shape[0]),
        q,
        *cache_views(kv_cache),
        scale_argument(call.kv_scale),
        *call.tables(),
        *call.results(),
        call.plan.outgrown,
        scale_to_log2(call.scale),
        q.stride(0),
        q.stride(1),
        q.stride(2),
        kv_cache.stride(0),
        *call.sizes(),
        **kernel_constants(dims, kv_format, *cache_sizes(kv_cache)),
        **tile_constants(
            tile, arch, call.rescale, kv_format, q.dtype, prefetch=may_prefetch(kv_cache, tile)
        ),
        **call.modes(),
        LOAD_SCALE=isinstance(call.kv_scale, torch.Tensor),
        **tile_options(tile),
    )


def cache_sizes(kv_cache: torch.Tensor) -> tuple[int, int, int]:
    """Tokens of a page, stride and alignment of rows, as kernel_constants takes them."""
    return kv_cache.shape[1], kv_cache.stride(1), row_alignment(kv_cache)


def kernel_constants(
    dims: MlaDims, kv_format: str, page: int, row: int, align: int
) -> dict[str, Any]:
    """Compile-time arguments that the cache decides."""
    layout = Fp8DsMlaLayout(dims)
    return {
        "DV": dims.kv_lora_rank,
        "DR": dims.rope_dim,
        "PAGE": page,
        "ROW": row,
        "FORMAT": kv_format,
        "GROUP": layout.group_size,
        "SCALE_OFFSET": layout.scale_offset,
        "ROPE_OFFSET": layout.rope_offset,
        "ALIGN": align,
    }


def may_prefetch(kv_cache: torch.Tensor, tile: Tile) -> bool:
    """Whether a tile lies within a page and not much lies between its rows, as in a cache whose
    blocks hold all layers: all of that would be read from memory too."""
    _, page, width = kv_cache.shape
    return page % tile.tokens == 0 and kv_cache.stride(1) < 2 * width


def tile_constants(
    tile: Tile, arch: Arch, rescale: str, kv_format: str, dtype: torch.dtype, *, prefetch: bool
) -> dict[str, Any]:
    """Compile-time arguments that the tile and the GPU decide, and whether the cache lets a tile be
    asked for ahead."""
    # fp16 holds every e4m3 value and costs half a conversion instruction. With q rows on wgmma's
    # M side a converted q would take the registers.
    fp16_dots = kv_format == "fp8" and (tile.order == "tokens" or not tile.wgmma)
    # fp16 weights have no room above the first tile's maximum.
    fixed = rescale == "pow2" and not fp16_dots and dtype != torch.float16
    return {
        "BM": tile.rows,
        "BN": tile.tokens,
        "STAGES": tile.stages,
        "RESCALE": rescale,
        # The paper's integer add is worth its guard only when something changed.
        "LAZY_BRANCH": tile.lazy_branch or rescale == "amla",
        "ORDER": tile.order,
        "REFERENCE": "first" if fixed else "lazy",
        "FP16_DOTS": fp16_dots,
        "WGMMA": tile.wgmma,
        "WARPS": tile.warps,
        "CARRY": tile.carry,
        "PREFETCH": tile.prefetch if prefetch and not INTERPRET else 0,
        "HW_FP8": arch.e4m3_convert and not INTERPRET,
        "PDL": arch.programmatic_launch and not INTERPRET,
        "INTERPRET": INTERPRET,
    }


def tile_options(tile: Tile) -> dict[str, int]:
    """Compiler options of the tile."""
    return {
        "num_warps": tile.warps,
        "num_stages": tile.stages,
        "maxnreg": tile.max_registers,
    }
