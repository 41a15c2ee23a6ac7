# SPDX-License-Identifier: Apache-2.0
"""Launching the many-rows kernel. Arguments are checked by `mla_kernels.decode.api`."""

import torch
import triton

from mla_kernels import checks
from mla_kernels.arch import Arch
from mla_kernels.decode.call import DecodeCall
from mla_kernels.decode.hopper import layouts
from mla_kernels.decode.hopper.bf16.launcher import cache_descriptors, query_descriptors
from mla_kernels.decode.rescale import scale_to_log2
from mla_kernels.decode.triton.many_rows.kernel import many_rows_kernel
from mla_kernels.decode.triton.tiles import tile_rows
from mla_kernels.layouts import MlaDims
from mla_kernels.triton_common.launch import launch

# The least that a warp may have: the eight others get 240.
LOADER_REGS = 24


def takes_many_rows(
    q: torch.Tensor, kv_cache: torch.Tensor, dims: MlaDims, arch: Arch, rescale: str
) -> bool:
    """Whether this kernel serves a batch. Up to 16 rows one with smaller tiles is faster."""
    return (
        arch.sm == 90
        and tile_rows(q.shape[1] * q.shape[2], arch) > 16
        and rescale == "pow2"
        and dims == MlaDims(512, 64)
        and kv_cache.dtype in (torch.bfloat16, torch.float16)
        and kv_cache.shape[1] == layouts.BLOCK.value
        and checks.is_for_tma(q)
        and kv_cache.is_contiguous()
        and kv_cache.data_ptr() % 16 == 0
    )


def launch_many_rows(call: DecodeCall) -> None:
    """One program a tile of 64 query rows and part of the plan; splits are left to the merge."""
    launch(
        many_rows_kernel,
        (triton.cdiv(call.rows, layouts.BLOCK.value), call.plan.parts.shape[0]),
        *query_descriptors(call.q, call.out.shape[-1]),
        *cache_descriptors(call.kv_cache),
        *call.tables(),
        *call.results(),
        scale_to_log2(call.scale),
        *call.sizes(),
        **call.modes(),
        LOADER_REGS=LOADER_REGS,
        num_warps=8,
    )
