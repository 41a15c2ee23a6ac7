# SPDX-License-Identifier: Apache-2.0
"""Launching the bf16 Hopper kernel. Arguments are checked by `mla_kernels.decode.api`."""

from typing import Any

import torch
import triton
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from mla_kernels.decode.call import DecodeCall
from mla_kernels.decode.hopper import layouts
from mla_kernels.decode.hopper.bf16.kernel import hopper_decode_kernel
from mla_kernels.decode.query import Query, row_parts
from mla_kernels.decode.rescale import scale_to_log2
from mla_kernels.triton_common.launch import launch

# Tiles of each ring: 211 KB of shared memory. 160 is the only register share of the two value
# warpgroups that compiles without spills or serialised wgmma.
CONFIG = {"SLOTS_A": 3, "SLOTS_B": 2, "SLOTS_P": 2, "WORKER_REGS": 160}
# Up to here a branch in the loop over tiles costs less than fetching a second copy of its code;
# with more, long requests take 2 to 5 % longer for it (row 52 of
# benchmarks/versions/decode_hopper.md).
MOST_ROWS_IN_ONE_LOOP = 128


def launch_bf16(call: DecodeCall) -> None:
    """One CTA a tile of 64 query rows and part of the plan; split requests are left to the merge.

    out is contiguous bf16, kv_cache [num_blocks, 64, 576] contiguous bf16.
    """
    out, lse, acc, sums = call.results()
    rows, modes = call.rows, call.modes()
    full = rows % layouts.BLOCK.value == 0 and out.data_ptr() % 16 == 0
    full = full and not (modes["CAUSAL"] and modes["CHUNKED"])  # would spill one in its loop
    results: tuple[Any, Any] = (out, acc)
    if full:
        results = (
            _boxes(out.view(-1, out.shape[-1]), layouts.HALF.value, layouts.TILE),
            _boxes(acc.view(-1, out.shape[-1]), layouts.HALF.value // 2, layouts.PARTIAL),
        )
    launch(
        hopper_decode_kernel,
        (triton.cdiv(rows, layouts.BLOCK.value), call.plan.parts.shape[0]),
        *query_descriptors(call.q, out.shape[-1]),
        *cache_descriptors(call.kv_cache),
        *call.tables(),
        results[0],
        lse,
        results[1],
        sums,
        scale_to_log2(call.scale),
        *call.sizes(),
        **CONFIG,
        **modes,
        RESCALE=call.rescale,
        FULL=full,
        PEELED=rows > MOST_ROWS_IN_ONE_LOOP,
        num_warps=4,
    )


def query_descriptors(q: Query, kv_lora_rank: int) -> tuple[TensorDescriptor, TensorDescriptor]:
    """TMA descriptors of the halves of the latent part and of the rope part."""
    latent, rope = row_parts(q, kv_lora_rank)
    block, half, layout = layouts.BLOCK.value, layouts.HALF.value, layouts.QUERY_TILE.value
    return (
        TensorDescriptor.from_tensor(latent, [1, block, half], layout),
        TensorDescriptor.from_tensor(rope, [1, block, layouts.ROPE.value], layout),
    )


def cache_descriptors(kv_cache: torch.Tensor) -> tuple[TensorDescriptor, TensorDescriptor]:
    """TMA descriptors of a bf16 cache: halves of the latent columns, rope columns."""
    cache = kv_cache.view(-1, kv_cache.shape[-1])
    half, rope = layouts.HALF.value, layouts.ROPE.value
    return _boxes(cache, half, layouts.TILE), _boxes(cache, rope, layouts.TILE)


def _boxes(rows: torch.Tensor, width: int, layout: Any) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(rows, [layouts.BLOCK.value, width], layout.value)
