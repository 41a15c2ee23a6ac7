# SPDX-License-Identifier: Apache-2.0
"""The indexer's Hopper kernels: their scores on a GPU, and what they do not take."""

import pytest
import torch
from mla_kernels import exact_topk, indexer_scores, indexer_topk
from mla_kernels.indexer.hopper import launcher as launcher_hopper
from mla_kernels.indexer.hopper.launcher import refusal
from mla_kernels.indexer.triton import specs
from mla_kernels.testing.indexer_case import make_indexer_case

from tests.kernels.indexer.expected_scores import HOPPER, INF, assert_scores, expected


@pytest.mark.gpu
@pytest.mark.skipif(not HOPPER, reason="needs an sm_90 GPU")
@pytest.mark.parametrize("heads", [64, 40, 8])
@pytest.mark.parametrize("lengths", [[130, 0, 1, 64, 700], [900] * 40, [0, 0], [20000, 0, 7]])
def test_hopper_kernel(lengths, heads):
    case = make_indexer_case(lengths, heads=heads, device="cuda")
    want, visible = expected(case)
    out = torch.full(want.shape, float("nan"), device="cuda")
    scores = indexer_scores(*case.args, out=out, impl="hopper")
    assert_scores(scores, want)
    for k in (20, 2048):
        fused = indexer_topk(*case.args, k, impl="hopper")
        assert torch.equal(fused, exact_topk(scores, k, lengths=visible.cuda(), impl="triton"))


@pytest.mark.gpu
@pytest.mark.skipif(not HOPPER, reason="needs an sm_90 GPU")
@pytest.mark.parametrize("heads", [64, 24])
@pytest.mark.parametrize(
    "rows", [{"s_q": 2}, {"s_q": 3}, {"s_q": 4}, {"s_q": 7}, {"chunks": [1, 0, 1, 1, 2]},
             {"chunks": [600, 0, 1, 40, 130]}]
)  # fmt: skip
def test_hopper_kernel_of_several_rows(rows, heads, monkeypatch):
    case = make_indexer_case([5000, 0, 1, 64, 130], heads=heads, device="cuda", **rows)
    want, visible = expected(case)
    out = torch.full(want.shape, float("nan"), device="cuda")
    scores = indexer_scores(*case.args, **case.rows, out=out, impl="hopper")
    assert_scores(scores, want)
    portable = indexer_scores(*case.args, **case.rows, impl="triton")
    assert torch.allclose(scores, portable, rtol=1e-5, atol=1e-5)
    monkeypatch.setattr(launcher_hopper, "TILE_COUNTS", (16, 128, 128))  # in turns
    assert torch.equal(indexer_scores(*case.args, **case.rows, impl="hopper"), scores)
    monkeypatch.undo()
    for k in (20, 2048):
        fused = indexer_topk(*case.args, k, **case.rows, impl="hopper")
        assert torch.equal(fused, exact_topk(scores, k, lengths=visible.cuda(), impl="triton"))


@pytest.mark.gpu
@pytest.mark.skipif(not HOPPER, reason="needs an sm_90 GPU")
@pytest.mark.parametrize(
    "rows", [{"s_q": 1}, {"s_q": 2}, {"s_q": 3}, {"chunks": [1, 0, 1, 1, 2]},
             {"chunks": [600, 0, 1, 40, 130]}]
)  # fmt: skip
@pytest.mark.parametrize("heads", [64, 24])
def test_products_in_fp8(heads, rows):
    case = make_indexer_case([5000, 0, 1, 64, 700], heads=heads, device="cuda", **rows)
    want, visible = expected(case)
    out = torch.full(want.shape, float("nan"), device="cuda")
    options = {**case.rows, "fp8_products": True}
    scores = indexer_scores(*case.args, **options, out=out)
    assert torch.equal(scores == -INF, want == -INF)
    seen = want > -INF
    error = torch.linalg.norm(scores.double()[seen] - want[seen])
    assert 1e-6 < error / torch.linalg.norm(want[seen]) < 2e-4  # exact ones: 1e-7
    for k in (20, 2048):
        fused = indexer_topk(*case.args, k, **options)
        assert torch.equal(fused, exact_topk(scores, k, lengths=visible.cuda(), impl="triton"))


@pytest.mark.gpu
@pytest.mark.skipif(not HOPPER, reason="needs an sm_90 GPU")
@pytest.mark.parametrize("fp8_products", [False, True])
@pytest.mark.parametrize("rows", [{"s_q": 2}, {"s_q": 3}, {"chunks": [600, 0, 1, 40, 130]}])
@pytest.mark.parametrize("heads", [64, 24])
def test_a_row_has_the_same_bits_alone(heads, rows, fp8_products):
    """Tiles of two rows, and each row a request of its own."""
    case = make_indexer_case([5000, 0, 1, 64, 700], heads=heads, device="cuda", **rows)
    options = {"fp8_products": fp8_products, "impl": "hopper"}
    together = indexer_scores(*case.args, **case.rows, **options)
    T, B = len(case.q), len(case.seq_lens)
    ids = case.request_ids
    if ids is None:
        ids = torch.arange(B, device="cuda").repeat_interleave(T // B)
    lengths = expected(case)[1].cuda()
    table = case.block_table[ids.clamp(min=0)].contiguous()
    alone = indexer_scores(case.q, case.k_cache, case.weights, table, lengths, **options)
    assert torch.equal(alone, together)


def test_the_forms_of_both_caches_are_compiled_offline():
    """And of rows that name their request."""
    forms = {(c.k_fp8, c.q_fp8, c.ragged, c.split) for c in specs.SCORES}
    for fp8 in (True, False):
        assert {(fp8, fp8, False, True), (fp8, fp8, True, False)} <= forms
    assert (True, True, True, True) in forms
    assert {(False, True, False, True), (True, False, False, True)} <= forms


def test_what_the_hopper_kernel_does_not_take():
    case = make_indexer_case([60, 3], s_q=2)
    q, k_cache = case.q, case.k_cache
    assert refusal(q, k_cache) is None
    assert "e4m3 q" in refusal(q.bfloat16(), k_cache)
    assert "contiguous" in refusal(q, k_cache[::2])
    with pytest.raises(ValueError, match="impl='hopper' of indexer_scores cannot run here"):
        indexer_scores(q.bfloat16(), *case.args[1:], impl="hopper")


def test_products_in_fp8_are_refused_where_they_cannot_be_had():
    """Never other numbers in their place."""
    case = make_indexer_case([60, 3], s_q=2)
    for impl in ("auto", "hopper"):
        with pytest.raises(ValueError, match="impl='hopper' of indexer_topk cannot run here"):
            indexer_topk(*case.args, 5, fp8_products=True, impl=impl)
    for flag in ("no", 2, None, torch.tensor(True)):
        for run in (indexer_scores, lambda *args, **how: indexer_topk(*args, 5, **how)):
            with pytest.raises(ValueError, match=r"fp8_products in \[True, False\]"):
                run(*case.args, fp8_products=flag)
    for impl in ("triton", "torch", "reference"):
        with pytest.raises(ValueError, match=f"needs impl='hopper' or 'auto', got impl='{impl}'"):
            indexer_scores(*case.args, fp8_products=True, impl=impl)
