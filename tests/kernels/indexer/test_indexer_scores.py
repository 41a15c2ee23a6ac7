# SPDX-License-Identifier: Apache-2.0
"""Indexer scores against the fp64 definition on the same quantised inputs."""

import numpy as np
import pytest
import torch
from mla_kernels import indexer_lengths, indexer_scores, indexer_topk, positions_to_slots
from mla_kernels.indexer.reference import indexer_scores_reference
from mla_kernels.indexer.triton import launcher
from mla_kernels.testing.indexer_case import make_indexer_case

from tests.kernels.indexer.expected_scores import (
    FORMATS,
    HOPPER,
    IMPLS,
    INF,
    LENGTHS,
    assert_scores,
    expected,
)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(("q_fp8", "k_fp8"), FORMATS)
@pytest.mark.parametrize(("heads", "s_q"), [(64, 1), (64, 2), (32, 4), (8, 3), (5, 6)])
def test_decode_rows(heads, s_q, q_fp8, k_fp8, impl, device):
    options = {"s_q": s_q, "heads": heads, "q_fp8": q_fp8, "k_fp8": k_fp8}
    case = make_indexer_case(LENGTHS, **options, device=device)
    want, _ = expected(case)
    out = torch.full(want.shape, float("nan"), device=device)
    got = indexer_scores(*case.args, out=out, impl=impl)
    assert got is out
    assert_scores(got, want)


@pytest.mark.parametrize("impl", IMPLS)
def test_the_last_position_there_is_sees_all_keys(impl, device):
    case = make_indexer_case(LENGTHS, s_q=1, heads=8, device=device)
    last = torch.full((len(case.q),), 2**31 - 1, dtype=torch.int32, device=device)
    assert torch.equal(indexer_lengths(case.seq_lens, len(case.q), positions=last), case.seq_lens)
    assert_scores(indexer_scores(*case.args, positions=last, impl=impl), expected(case)[0])


@pytest.mark.parametrize("fp8", [True, False])
@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("chunks", [[9, 0, 1, 3], [70, 1, 1, 64]])
def test_prefill_rows_of_several_requests(chunks, impl, fp8, device):
    formats = {"q_fp8": fp8, "k_fp8": fp8}
    case = make_indexer_case([130, 3, 1, 64], chunks=chunks, heads=16, device=device, **formats)
    want, lengths = expected(case)
    assert_scores(indexer_scores(*case.args, **case.rows, impl=impl), want)
    found = indexer_lengths(case.seq_lens, len(case.q), **case.rows)
    assert torch.equal(found.cpu(), lengths)
    by_length = {"request_ids": case.request_ids, "lengths": found}
    assert_scores(indexer_scores(*case.args, **by_length, impl=impl), want)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("heads", [64, 24])
@pytest.mark.parametrize(
    "fp8, how",
    [
        (True, {"impl": "triton", "deterministic": True}),
        (False, {"impl": "triton", "deterministic": True}),
        (True, {"impl": "hopper"}),
        (True, {"fp8_products": True}),
    ],
)
def test_a_row_has_the_same_bits_whatever_it_shares_a_tile_with(fp8, how, heads):
    """Which batch-invariant mode rests on: alone, among drafts, in a mixed step, in a prompt. The
    interpreter's products round by their shape. For the portable kernel's layouts, which the bits
    follow, test_indexer_determinism.py needs no GPU."""
    if how.get("impl") != "triton" and not HOPPER:
        pytest.skip("needs an sm_90 GPU")
    options = {"s_q": 6, "heads": heads, "q_fp8": fp8, "k_fp8": fp8}
    case = make_indexer_case([3000, 130, 64, 9], **options, device="cuda")
    _, lengths = expected(case)
    lengths, T = lengths.cuda(), len(case.q)
    request = torch.arange(4, device="cuda", dtype=torch.int32).repeat_interleave(6)
    keys, (q, k_cache, weights, table, _) = {"lengths": lengths}, case.args
    whole = indexer_scores(*case.args, **how)
    for rows in (1, 2, 3):
        tables, ends = table[request[::rows]], lengths[rows - 1 :: rows].contiguous()
        assert torch.equal(indexer_scores(q, k_cache, weights, tables, ends, **how), whole)
    for copies in (1, 2):  # more than 4 rows a request share tiles, fewer do not
        tables, ends = table.repeat(copies, 1), case.seq_lens.repeat(copies)
        args = (q, k_cache, weights, tables, ends)
        assert (T > 4 * len(tables)) == (copies == 1)
        assert torch.equal(indexer_scores(*args, request_ids=request, **keys, **how), whole)


@pytest.mark.parametrize("split", [True, False])
def test_rows_of_a_request_need_not_be_neighbours(split, device, monkeypatch):
    if not split:
        monkeypatch.setattr(launcher, "MAX_SPLIT_TILES", 0)
    case = make_indexer_case([130, 40, 64], chunks=[20, 11, 14], heads=16, device=device)
    order = torch.randperm(len(case.q), generator=torch.Generator().manual_seed(7)).to(device)
    want, _ = expected(case)
    args = (case.q[order], case.k_cache, case.weights[order], case.block_table, case.seq_lens)
    rows = {name: x[order] for name, x in case.rows.items()}
    for impl in IMPLS:
        assert_scores(indexer_scores(*args, **rows, impl=impl), want[order])


@pytest.mark.parametrize(
    ("s_q", "positions", "seen"), [(1, [5, 200], [6, 70]), (2, [5, 200, -1, 69], [6, 130, 0, 70])]
)
def test_positions_inside_a_uniform_batch(s_q, positions, seen, device):
    case = make_indexer_case([130, 70], s_q=s_q, heads=8, device=device)
    positions = torch.tensor(positions, dtype=torch.int32, device=device)
    lengths = torch.tensor(seen, dtype=torch.int32, device=device)
    args = (case.q, case.k_cache, case.weights, case.block_table)
    want = indexer_scores_reference(*args, lengths)
    for impl in IMPLS:
        assert_scores(indexer_scores(*case.args, positions=positions, impl=impl), want)


def test_pages_are_dealt_out_whatever_the_number_of_programs(device, monkeypatch):
    case = make_indexer_case([300, 1, 0, 129], s_q=2, heads=8, device=device)
    want, _ = expected(case)
    for programs in (1, 2, 3, 9, 64):
        monkeypatch.setattr(launcher, "num_programs", lambda _, n=programs: n)
        assert_scores(indexer_scores(*case.args, impl="triton"), want)


def test_unclean_scores_end_with_the_last_page(device):
    case = make_indexer_case([70, 1], heads=8, device=device)
    want, _ = expected(case)
    out = torch.full(want.shape, 7.0, device=device)
    indexer_scores(*case.args, clean=False, out=out, impl="triton")
    assert_scores(out[0, :128], want[0, :128])
    assert_scores(out[1, :64], want[1, :64])
    assert (out[0, 128:] == 7).all()
    assert (out[1, 64:] == 7).all()


@pytest.mark.parametrize("impl", IMPLS)
def test_a_length_past_all_keys_is_that_of_all(impl, device):
    case = make_indexer_case([128, 70], heads=4, device=device)
    q, k_cache, weights, block_table, seq_lens = case.args
    table = block_table[:, :2].contiguous()
    lengths = torch.tensor([2**31 - 1, 70], dtype=torch.int32, device=device)
    want, _ = expected(case)
    memory = torch.full((3, 128), 7.0, device=device)
    call = q, k_cache, weights, table, seq_lens
    got = indexer_scores(*call, lengths=lengths, out=memory[1:], impl=impl)
    assert_scores(got, want[:, :128])
    assert (memory[0] == 7).all()


def test_numpy_sizes(device):
    case = make_indexer_case([60, 3], heads=8, device=device)
    for impl in IMPLS:
        want = indexer_topk(*case.args, 5, impl=impl)
        assert torch.equal(indexer_topk(*case.args, np.int64(5), impl=impl), want)
        slots = positions_to_slots(want, case.args[3], block_size=64, impl=impl)
        sizes = {"block_size": np.int64(64), "impl": impl}
        assert torch.equal(positions_to_slots(want, case.args[3], **sizes), slots)


@pytest.mark.parametrize("impl", IMPLS)
def test_a_negative_length_is_0(impl, device):
    case = make_indexer_case([1, 70], heads=4, device=device)
    *args, seq_lens = case.args
    want, _ = expected(case)
    want[0] = -INF
    seq_lens[0] = -200
    memory = torch.full((3, want.shape[1]), 7.0, device=device)
    assert_scores(indexer_scores(*args, seq_lens, out=memory[1:], impl=impl), want)
    assert (memory[0] == 7).all()
    assert (indexer_topk(*args, seq_lens, 9, impl=impl)[0] == -1).all()


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("nan", [0x7F, 0xFF])
def test_zeros_of_the_relu_are_exact_and_nan_is_kept(nan, impl, device):
    case = make_indexer_case([130], heads=4, device=device)
    q = case.q.float()
    q[:] = 0
    q[0, :, 0] = -1.0
    codes = case.k_cache.view(len(case.k_cache), -1)
    page = int(case.block_table[0, 0])
    codes[page, : 64 * 128 : 128] = 0x38  # k[:, 0] = 1.0 in the first page: every dot is negative
    codes[page, 3 * 128] = nan
    args = (q.to(torch.float8_e4m3fn), *case.args[1:])
    got = indexer_scores(*args, impl=impl)[0, :64]
    assert got[3].isnan()
    keep = torch.arange(64) != 3
    assert (got[keep.to(device)] == 0).all()


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("q_fp8", [True, False])
@pytest.mark.parametrize(("heads", "s_q"), [(3, 1), (20, 2), (16, 2)])
def test_an_infinite_key_scores_as_the_heads_that_there_are_say(heads, s_q, q_fp8, impl, device):
    """Those that fill a tile are zero, and zero times infinity would be NaN."""
    case = make_indexer_case([130], s_q=s_q, heads=heads, q_fp8=q_fp8, k_fp8=False, device=device)
    q = case.q.float()
    q[..., 0] = 1.0
    page = int(case.block_table[0, 0])
    case.k_cache[page, 3, 0] = INF
    case.k_cache[page, 5, 0] = -INF
    args = (q.to(case.q.dtype), case.k_cache, case.weights.abs() + 0.1, *case.args[3:])
    got = indexer_scores(*args, impl=impl)[:, :64]
    assert (got[:, 3] == INF).all() and (got[:, 5] == 0).all()
    rest = [n for n in range(64) if n not in (3, 5)]
    assert got[:, rest].isfinite().all()
    assert (indexer_topk(*args, 9, impl=impl) == 3).any(1).all()


def test_no_rows(device):
    case = make_indexer_case([], heads=8, device=device)
    for impl in IMPLS:
        assert indexer_scores(*case.args, impl=impl).shape == (0, 128)
        assert indexer_topk(*case.args, 5, impl=impl).shape == (0, 5)


def wrong(case, **change):
    names = ("q", "k_cache", "weights", "block_table", "seq_lens")
    return {**dict(zip(names, case.args, strict=True)), **case.rows, **change}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(4, 8, 64, dtype=torch.bfloat16)}, r"q of shape \[T, H, 128\]"),
        ({"q": torch.zeros(4, 8, 128)}, "q.dtype"),
        ({"q": torch.zeros(4, 65, 128, dtype=torch.bfloat16)}, "heads .* in 1..64, got 65"),
        ({"k_cache": torch.zeros(5, 64, 128, dtype=torch.uint8)}, "k_cache of shape .*132"),
        ({"k_cache": torch.zeros(5, 32, 132, dtype=torch.uint8)}, "k_cache of shape .* 64, 132"),
        ({"k_cache": torch.zeros(64, 5, 132, dtype=torch.uint8).transpose(0, 1)}, "contiguous pag"),
        ({"weights": torch.zeros(4, 8, dtype=torch.bfloat16)}, "weights.dtype"),
        ({"weights": torch.zeros(4, 7)}, r"weights of shape \[4, 8\]"),
        ({"seq_lens": torch.zeros(2, dtype=torch.int64)}, "seq_lens.dtype"),
        ({"seq_lens": torch.zeros(3, dtype=torch.int32)}, r"seq_lens of shape \[2\]"),
        ({"request_ids": torch.zeros(4, dtype=torch.int32)}, "positions .* together with request"),
        ({"positions": torch.zeros(3, dtype=torch.int32)}, r"positions of shape \[4\]"),
        ({"q": torch.zeros(3, 8, 128, dtype=torch.bfloat16), "weights": torch.zeros(3, 8)},
         "multiple of 2 rows"),
        ({"request_ids": torch.tensor([0, 0, 1, -1]).int(),
          "lengths": torch.tensor([9, 9, 9, 9]).int()}, "lengths of 0 for padding rows.*got 9"),
        ({"impl": "fast"}, "Expected impl in"),
        ({"out": torch.zeros(4, 64)}, r"out of shape \[4, 192\]"),
    ],
)  # fmt: skip
def test_refusals(change, message):
    case = make_indexer_case([60, 3], s_q=2, heads=8)
    with pytest.raises(ValueError, match=message):
        indexer_scores(**wrong(case, **change))


@pytest.mark.parametrize("impl", ["torch", "reference"])
def test_nothing_is_recorded_for_gradients(impl):
    case = make_indexer_case([70], heads=4)
    weights = case.args[2].requires_grad_()
    args = (*case.args[:2], weights, *case.args[3:])
    assert not indexer_scores(*args, impl=impl).requires_grad
