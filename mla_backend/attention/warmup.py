# SPDX-License-Identifier: Apache-2.0
"""Compile at start-up every variant of the kernels that a decode step may launch."""

from types import SimpleNamespace
from typing import Any

import torch
from mla_kernels.decode.query import Query, tokens_of
from mla_kernels.layouts import Fp8DsMlaLayout

from mla_backend.attention import support
from mla_backend.attention.kernel import DecodeKernel
from mla_backend.attention.step_plans import StepPlans

# Kernels are specialised by the number of requests: up to here perhaps by each, then by powers of
# two.
_ONE_BY_ONE = 160


def batch_sizes(largest: int) -> list[int]:
    """Numbers of requests that cover every specialisation up to `largest`."""
    sizes = {*range(1, min(largest, _ONE_BY_ONE) + 1), largest}
    power = 1
    while power < largest:
        sizes |= {power, power + 1}
        power *= 2
    return sorted(sizes)


def warm_up(
    layer: Any,
    plans: StepPlans,
    *,
    num_heads: int,
    max_s_q: int,
    max_blocks: int,
) -> None:
    """Write no token (slot -1) and decode empty requests (length 0) of every shape.

    `layer` is an MLA layer of vLLM with our impl; max_blocks is the width of the block table.
    """
    impl = layer.impl
    kernel = impl.decode_kernel
    device = layer._k_scale.device
    latent, rope = kernel.dims.kv_lora_rank, kernel.dims.rope_dim
    width = Fp8DsMlaLayout(kernel.dims).row_bytes
    if kernel.kv_cache_dtype != torch.uint8:
        width = (latent + rope) * kernel.kv_cache_dtype.itemsize
    pages = torch.zeros(1, support.BLOCK_SIZE, width, dtype=torch.uint8, device=device)
    cache = pages.view(kernel.kv_cache_dtype)

    def new(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=kernel.dtype, device=device)

    nowhere = torch.full((1,), -1, dtype=torch.int64, device=device)
    impl.do_kv_cache_update(
        new(1, latent), new(1, 1, rope), cache, nowhere, impl.kv_cache_dtype, layer._k_scale
    )
    most = plans.most_requests(1)
    table = torch.zeros(most, max_blocks, dtype=torch.int32, device=device)
    lengths = torch.zeros(most, dtype=torch.int32, device=device)
    for s_q in range(1, max_s_q + 1):
        largest = plans.most_requests(s_q)
        query = queries(kernel, num_heads, largest * s_q, device)
        for B in batch_sizes(largest):
            T = B * s_q
            plan = plans.for_step(lengths[:B], s_q)
            decode = SimpleNamespace(
                block_table=table[:B], lengths=lengths[:B], plan=plan, tokens=T, rest=None
            )
            step = SimpleNamespace(decode=decode)
            impl.forward_mqa(tokens_of(query, slice(T)), cache, step, layer)


def queries(kernel: DecodeKernel, num_heads: int, tokens: int, device: torch.device) -> Query:
    """Zeros in the form in which vLLM hands queries over: the two parts, or one tensor of codes."""
    latent, rope = kernel.dims.kv_lora_rank, kernel.dims.rope_dim
    if kernel.query_dtype == torch.float8_e4m3fn:
        codes = torch.zeros(tokens, num_heads, latent + rope, dtype=torch.uint8, device=device)
        return codes.view(torch.float8_e4m3fn)
    q_latent = torch.zeros(num_heads, tokens, latent, dtype=kernel.dtype, device=device)
    q_rope = torch.zeros(tokens, num_heads, rope, dtype=kernel.dtype, device=device)
    return q_latent.transpose(0, 1), q_rope
