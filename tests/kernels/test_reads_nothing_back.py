# SPDX-License-Identifier: Apache-2.0
"""On a device that no kernel serves, ops in torch read no number of it, which would wait for it and
cannot be captured in a CUDA graph. Meta tensors are on such a device and have none to be read."""

import pytest
import torch
from mla_kernels import (
    indexer_topk,
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


@pytest.mark.parametrize("cache", [meta(9, 64, 132, dtype=torch.uint8), meta(9, 64, 128)])
def test_indexer(cache):
    write_indexer_cache(meta(5, 128), cache, ints(4))
    starts, request_ids, lengths = ints(3), ints(5), ints(5)
    token_rows(starts, ints(2), request_ids=request_ids, lengths=lengths)
    weights = meta(5, 64, dtype=torch.float32)
    rows = {"request_ids": request_ids, "lengths": lengths}
    chosen = indexer_topk(meta(5, 64, 128), cache, weights, ints(2, 4), ints(2), 7, **rows)
    assert chosen.shape == (5, 7)


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
