# SPDX-License-Identifier: Apache-2.0
"""On a device that no kernel serves, ops in torch read no number of it, which would wait for it and
cannot be captured in a CUDA graph. Meta tensors are on such a device and have none to be read."""

import pytest
import torch
from mla_kernels import (
    indexer_topk,
    merge_topk,
    mla_decode,
    mla_sparse_attention,
    write_indexer_cache,
    write_kv_cache,
)
from mla_kernels.indexer.rows import token_rows

CACHES = [(torch.bfloat16, 576), (torch.float8_e4m3fn, 576), (torch.uint8, 656)]


def meta(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


def ints(*shape):
    return meta(*shape, dtype=torch.int32)


def cache_of(dtype, width):
    scale = meta(1, dtype=torch.float32) if dtype == torch.float8_e4m3fn else None
    return meta(9, 64, width, dtype=dtype), {"kv_scale": scale}


@pytest.mark.parametrize(("dtype", "width"), CACHES)
def test_cache_rows(dtype, width):
    cache, scale = cache_of(dtype, width)
    write_kv_cache(meta(5, 512), meta(5, 64), cache, ints(4), **scale)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize(("dtype", "width"), CACHES)
def test_cache_rows_in_a_cuda_graph(dtype, width):
    """A scale that is a number too: nothing is copied from the host."""
    scale = {"kv_scale": 0.7} if dtype == torch.float8_e4m3fn else {}
    cache = torch.zeros(4, 64, width, dtype=torch.uint8, device="cuda").to(dtype)
    kv_c, k_pe = (torch.randn(5, n, device="cuda").bfloat16() for n in (512, 64))
    slots = torch.tensor([3, -1, 70, 255], dtype=torch.int32, device="cuda")
    write_kv_cache(kv_c, k_pe, torch.zeros_like(cache), slots, **scale, impl="torch")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        write_kv_cache(kv_c, k_pe, cache, slots, **scale, impl="torch")
    kv_c.neg_()
    slots.copy_(torch.tensor([-1, 9, 0, -1]))
    graph.replay()
    want = torch.zeros_like(cache)
    write_kv_cache(kv_c, k_pe, want, slots, **scale, impl="triton")
    assert torch.equal(cache.view(torch.uint8), want.view(torch.uint8))


@pytest.mark.parametrize("cache", [meta(9, 64, 132, dtype=torch.uint8), meta(9, 64, 128)])
def test_indexer(cache):
    write_indexer_cache(meta(5, 128), cache, ints(4))
    starts, request_ids, lengths = ints(3), ints(5), ints(5)
    token_rows(starts, ints(2), request_ids=request_ids, lengths=lengths)
    weights = meta(5, 64, dtype=torch.float32)
    rows = {"request_ids": request_ids, "lengths": lengths}
    chosen = indexer_topk(meta(5, 64, 128), cache, weights, ints(2, 4), ints(2), 7, **rows)
    assert chosen.shape == (5, 7)
    assert merge_topk(ints(2, 5, 2, 7), 1).shape == (5, 7)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("dtype", "width"), CACHES)
def test_attention(dtype, width, deterministic):
    cache, options = cache_of(dtype, width)
    options |= {"scale": 0.1, "deterministic": deterministic}
    q = meta(5, 4, 512), meta(5, 4, 64)
    out, _ = mla_sparse_attention(q, cache, ints(5, 70), lengths=ints(5), **options)
    assert out.shape == (5, 4, 512)
    q = meta(2, 1, 4, 512), meta(2, 1, 4, 64)
    out, _ = mla_decode(q, cache, ints(2, 4), ints(2), **options)
    assert out.shape == (2, 1, 4, 512)
