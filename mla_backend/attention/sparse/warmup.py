# SPDX-License-Identifier: Apache-2.0
"""Compile at start-up every variant of the sparse kernels that a step may launch.

Steps of empty rows (length 0, no slot) go through the layer's own methods, so that what is compiled
here is what is launched later.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from mla_kernels.decode.query import Query, tokens_of
from mla_kernels.layouts import Fp8DsMlaLayout, IndexerLayout, MlaDims

from mla_backend.attention import support
from mla_backend.attention.sparse.rows import TokenRows
from mla_backend.attention.warmup import batch_sizes

# Query rows (tokens x heads) of the attention from which on a token is never split: more compile
# nothing else and would take memory.
MOST_ROWS = 2**16


@dataclass(frozen=True)
class StepShape:
    """`tokens` of `requests` requests; in_order: each has as many, one request after the other."""

    requests: int
    tokens: int
    in_order: bool


def step_shapes(max_tokens: int, max_requests: int) -> Iterator[StepShape]:
    """Steps that cover every specialisation of the kernels.

    They depend on the tokens (how many programs share a row, a tile, a token), on the run of a
    request's tokens (1, 2, 3 and more; longer ones are prompts), and on whether runs are equal.
    """
    for tokens in batch_sizes(max_tokens):
        for run in (1, 2, 3, 4):
            requests = tokens // run
            if requests * run == tokens and requests <= max_requests:
                yield StepShape(requests, tokens, True)
        yield StepShape(1, tokens, True)
        for requests in {1, min(tokens, max_requests)}:
            yield StepShape(requests, tokens, False)


def _rows(shape: StepShape, max_blocks: int, device: torch.device) -> TokenRows:
    B, T = shape.requests, shape.tokens
    zeros = torch.zeros(T, dtype=torch.int32, device=device)
    table = torch.zeros(B, max_blocks, dtype=torch.int32, device=device)
    return TokenRows(table, zeros[:B].clone(), None if shape.in_order else zeros, zeros)


def warm_up_indexer(indexer: Any, max_tokens: int, max_requests: int, max_blocks: int) -> None:
    """`indexer`: an `IndexerLayer` on a GPU. Its ranks warm up together: the shapes, and so the
    collectives, are the same on all of them."""
    topk_indices, heads = indexer.topk_indices, indexer.heads
    device = topk_indices.device
    layout = IndexerLayout()
    cache = torch.zeros(1, layout.block_size, layout.head_dim + 4, dtype=torch.uint8, device=device)
    nowhere = torch.full((max_tokens,), -1, dtype=torch.int64, device=device)
    keys = torch.zeros(max_tokens, layout.head_dim, dtype=indexer.dtype, device=device)
    q = torch.zeros(max_tokens, heads, layout.head_dim, dtype=torch.uint8, device=device)
    weights = torch.zeros(max_tokens, heads, dtype=torch.float32, device=device)
    for shape in step_shapes(max_tokens, max_requests):
        T = shape.tokens
        indexer.run(
            q[:T].view(torch.float8_e4m3fn),
            keys[:T],
            weights[:T],
            topk_indices,
            cache,
            _rows(shape, max_blocks, device),
            nowhere[:T],
        )


def warm_up_attention(layer: Any, max_tokens: int, max_requests: int, max_blocks: int) -> None:
    """`layer`: an MLA layer of vLLM with our sparse impl, on a GPU."""
    impl = layer.impl
    device = impl.topk_indices_buffer.device
    latent, rope = impl.kv_lora_rank, impl.head_size - impl.kv_lora_rank
    width = Fp8DsMlaLayout(MlaDims(latent, rope)).row_bytes
    if impl.kv_cache_element != torch.uint8:
        width = impl.head_size * impl.kv_cache_element.itemsize
    pages = torch.zeros(1, support.BLOCK_SIZE, width, dtype=torch.uint8, device=device)
    cache = pages.view(impl.kv_cache_element)

    def new(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=impl.dtype, device=device)

    nowhere = torch.full((1,), -1, dtype=torch.int64, device=device)
    impl.do_kv_cache_update(
        new(1, latent), new(1, 1, rope), cache, nowhere, impl.kv_cache_dtype, layer._k_scale
    )
    impl.topk_indices_buffer.fill_(-1)
    heads = impl.query_heads
    most = max(1, min(max_tokens, MOST_ROWS // heads))
    query: Query = (new(heads, most, latent).transpose(0, 1), new(most, heads, rope))
    if heads != impl.num_heads:  # gathered from the ranks of a group, the two parts come as one
        query = new(most, heads, impl.head_size)
    for shape in step_shapes(most, max_requests):
        step = SimpleNamespace(rows=_rows(shape, max_blocks, device))
        T = shape.tokens
        impl.forward_mqa(tokens_of(query, slice(T)), cache, step, layer)
