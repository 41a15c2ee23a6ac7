# SPDX-License-Identifier: Apache-2.0
"""Dtypes of results; results whose rows overlap are refused by name, as one of two rows at one
place would be lost, and workspaces that kernels cannot see as words."""

import pytest
import torch
from mla_kernels import (
    checks,
    exact_topk,
    indexer_scores,
    indexer_topk,
    mla_decode,
    mla_sparse_attention,
    write_indexer_cache,
    write_kv_cache,
)
from mla_kernels.flash_mla import flash_mla_sparse_fwd, flash_mla_with_kvcache, get_mla_metadata
from mla_kernels.testing.cases import decode_case
from mla_kernels.testing.indexer_case import make_indexer_case

K, WIDTH = 8, 256
APART = r"{} without overlapping rows, got shape \[.*\] and strides \({}"


def overlapping(shape, dtype, stride):
    """Rows `stride` elements apart along the first dimension; zeros."""
    strides = torch.empty(shape, device="meta").stride()
    size = (shape[0] - 1) * stride + sum(
        (n - 1) * s for n, s in zip(shape[1:], strides[1:], strict=True)
    )
    memory = torch.zeros(size + 1, dtype=dtype)
    return memory.as_strided(shape, (stride, *strides[1:]))


@pytest.mark.parametrize("impl", ["torch", "reference", "auto"])
@pytest.mark.parametrize("less", [0, 1])
def test_rows_of_the_indexer(less, impl):
    case = make_indexer_case([130, 70])
    scores = torch.randn(2, WIDTH)

    def topk(out):
        exact_topk(scores, K, out=out, impl=impl)

    def fused(out):
        indexer_topk(*case.args, K, out=out, impl=impl)

    def values(out):
        indexer_topk(*case.args, K, values=out, impl=impl)

    def plain(out):
        indexer_scores(*case.args, out=out, impl=impl)

    width = 64 * case.block_table.shape[1]
    for call, name, n, dtype in (
        (topk, "out", K, torch.int32),
        (fused, "out", K, torch.int32),
        (values, "values", K, torch.float32),
        (plain, "out", width, torch.float32),
    ):
        stride = less * (n - 1)
        out = overlapping((2, n), dtype, stride)
        with pytest.raises(ValueError, match=APART.format(name, stride)):
            call(out)
        assert not out.any()  # before anything was written
        apart = overlapping((2, n), dtype, n + 3)
        call(apart)
        assert apart.any(1).all()


@pytest.mark.parametrize("impl", ["torch", "reference"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_attention_in_fp64_too_returns_q_dtype_and_an_fp32_lse(impl, dtype):
    case = decode_case([5, 70], dtype=dtype)
    slots = torch.arange(K, dtype=torch.int32).expand(2, K).contiguous()
    dense = mla_decode(*case.args, **case.options, impl=impl)
    sparse = mla_sparse_attention(case.q[:, 0], case.kv_cache, slots, scale=1.0, impl=impl)
    for out, lse in (dense, sparse):
        assert (out.dtype, lse.dtype) == (dtype, torch.float32)


@pytest.mark.parametrize("stride", [0, 100])
def test_results_of_attention(stride):
    """They are contiguous, so a row has its place."""
    case = decode_case([5, 70])
    slots = torch.arange(K, dtype=torch.int32).expand(2, K).contiguous()
    q, options = case.q, case.options
    metadata, _ = get_mla_metadata()

    def dense(**results):
        mla_decode(q, case.kv_cache, case.block_table, case.seq_lens, **options, **results)

    def sparse(**results):
        mla_sparse_attention(q[:, 0], case.kv_cache, slots, **options, **results)

    for call, shape in ((dense, (2, 1, 16, 512)), (sparse, (2, 16, 512))):
        for name, size, dtype in (
            ("out", shape, q.dtype),
            ("lse", shape[:-1], torch.float32),
            ("max_logits", shape[:-1], torch.float32),
        ):
            if name == "max_logits" and call is dense:
                continue
            with pytest.raises(ValueError, match=f"contiguous {name}, got strides"):
                call(**{name: overlapping(size, dtype, stride % size[-1])})
    cache = case.kv_cache.unsqueeze(2)
    with pytest.raises(ValueError, match="contiguous out, got strides"):
        flash_mla_with_kvcache(
            q, cache, None, None, 512, metadata, indices=slots[:, None],
            out=overlapping((2, 1, 16, 512), q.dtype, stride),
        )  # fmt: skip
    rows = case.kv_cache.flatten(0, 1).unsqueeze(1)
    with pytest.raises(ValueError, match="contiguous out, got strides"):
        out = overlapping((2, 16, 512), q.dtype, stride)
        flash_mla_sparse_fwd(q[:, 0], rows, slots[:, None], 1.0, out=out)


@pytest.mark.parametrize("stride", [0, 60])
def test_caches_that_are_written(stride):
    slots = torch.tensor([0, 70])
    rows = torch.ones(2, 512), torch.ones(2, 64)
    cache = overlapping((2, 64, 576), torch.float32, stride)
    with pytest.raises(ValueError, match=APART.format("kv_cache", stride)):
        write_kv_cache(*rows, cache, slots)
    assert not cache.any()
    keys = overlapping((2, 64, 132), torch.uint8, stride)
    with pytest.raises(ValueError, match=APART.format("k_cache", stride)):
        write_indexer_cache(torch.ones(2, 128), keys, slots)
    assert not keys.any()
    rows_of_a_page = torch.zeros(2, 64, 576).as_strided((2, 64, 576), (64 * 576, stride, 1))
    with pytest.raises(ValueError, match="kv_cache without overlapping rows"):
        write_kv_cache(*rows, rows_of_a_page, slots)


def test_workspaces():
    case = make_indexer_case([130, 70])
    flat = torch.empty(1, dtype=torch.int32).expand(2**16)
    with pytest.raises(ValueError, match=r"contiguous workspace, got strides \(0,\)"):
        exact_topk(torch.randn(2, WIDTH), K, workspace=flat)
    with pytest.raises(ValueError, match=r"contiguous workspace, got strides \(0,\)"):
        indexer_topk(*case.args, K, workspace=flat.to(torch.uint8)[:1].expand(2**18))
    odd = torch.empty(2**18, dtype=torch.uint8)[1:]  # no words for a kernel
    with pytest.raises(ValueError, match="workspace at an address of a multiple of 4 bytes, got 0"):
        indexer_topk(*case.args, K, workspace=odd)
    dense = decode_case([5, 70])
    slots = torch.zeros(2, K, dtype=torch.int32)
    for workspace, message in (
        (odd, "workspace at an address of a multiple of 4 bytes"),
        (odd[:1].expand(2**18), "contiguous workspace"),
        (odd.int(), r"workspace.dtype in \[torch.uint8\]"),
    ):
        with pytest.raises(ValueError, match=message):
            mla_sparse_attention(
                dense.q[:, 0], dense.kv_cache, slots, workspace=workspace, **dense.options
            )


@pytest.mark.parametrize(
    ("shape", "strides", "distinct"),
    [
        ((3, 4), (4, 1), True),
        ((3, 4), (1, 3), True),
        ((3, 4), (3, 1), False),
        ((1, 4), (0, 1), True),
        ((0, 4), (0, 1), True),
        ((3, 1), (0, 1), False),
        ((2, 3, 4), (4, 8, 1), True),
        ((2, 3, 4), (4, 4, 1), False),
        ((), (), True),
    ],
)
def test_what_overlaps(shape, strides, distinct):
    x = torch.zeros(64).as_strided(shape, strides)
    if distinct:
        checks.check_distinct("x", x)
    else:
        with pytest.raises(ValueError, match="x without overlapping rows"):
            checks.check_distinct("x", x)
