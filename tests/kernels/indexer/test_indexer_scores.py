# SPDX-License-Identifier: Apache-2.0
"""Indexer scores and the fused top-k against the fp64 definition on the same quantised inputs."""

import types

import numpy as np
import pytest
import torch
from mla_kernels import (
    exact_topk,
    indexer_lengths,
    indexer_scores,
    indexer_topk,
    positions_to_slots,
)
from mla_kernels.indexer import fused as fused_form
from mla_kernels.indexer.hopper import launcher as launcher_hopper
from mla_kernels.indexer.hopper.launcher import refusal
from mla_kernels.indexer.reference import indexer_scores_reference
from mla_kernels.indexer.triton import launcher, specs
from mla_kernels.testing.indexer_case import make_indexer_case
from mla_kernels.topk import plan
from mla_kernels.topk.triton import spread_launcher

INF = float("inf")
IMPLS = ["torch", "triton"]
LENGTHS = [130, 0, 1, 64]
FORMATS = [(True, True), (False, True), (True, False), (False, False)]
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


def expected(case):
    """[T, width] fp64, by the definition: visible keys of each row, one row at a time."""
    T, B = len(case.q), len(case.seq_lens)
    lengths = []
    for t in range(T):
        request = t // (T // B) if case.request_ids is None else int(case.request_ids[t])
        if request < 0:
            lengths.append(0)
        elif case.positions is None:
            lengths.append(max(int(case.seq_lens[request]) - T // B + 1 + t % (T // B), 0))
        else:
            lengths.append(min(int(case.positions[t]) + 1, int(case.seq_lens[request])))
    lengths = torch.tensor(lengths, dtype=torch.int32)
    args = (case.q, case.k_cache, case.weights, case.block_table)
    return indexer_scores_reference(*args, lengths, request_ids=case.request_ids), lengths


def assert_scores(got, want):
    assert got.dtype == torch.float32
    assert torch.equal(torch.isneginf(got), torch.isneginf(want)), "masked entries"
    seen = ~torch.isneginf(want)
    got, want = got.double()[seen], want[seen]
    if want.numel() == 0:
        return
    assert torch.linalg.norm(got - want) <= 1e-5 * torch.linalg.norm(want)
    assert (got - want).abs().max() <= 1e-5 * want.abs().max()


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
        (True, {"impl": "triton"}),
        (False, {"impl": "triton"}),
        (True, {"impl": "hopper"}),
        (True, {"fp8_products": True}),
    ],
)
def test_a_row_has_the_same_bits_whatever_it_shares_a_tile_with(fp8, how, heads):
    """Which batch-invariant mode rests on: alone, among drafts, in a mixed step, in a prompt. The
    interpreter's products round by their shape."""
    if how != {"impl": "triton"} and not HOPPER:
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


@pytest.mark.parametrize("fp8", [True, False])
@pytest.mark.parametrize(("k", "lengths"), [(37, [130, 0, 1, 64]), (70, [700, 65])])
@pytest.mark.parametrize(
    ("s_q", "how"), [(1, "levels"), (2, "levels"), (2, "plain"), (1, "shared")]
)
def test_fused_equals_the_two_steps_bit_for_bit(s_q, how, lengths, k, fp8, device, monkeypatch):
    programs = {"levels": 0, "plain": 0, "shared": 100}[how]
    monkeypatch.setattr(spread_launcher, "resident_programs", lambda device: programs)
    monkeypatch.setattr(plan, "SPREAD_CHUNKS", (256,))
    if how == "plain":
        monkeypatch.setattr(fused_form, "MAX_PREPARED_PAGES", 0)
    # Every row takes levels, as rows above 32K do on a device.
    monkeypatch.setattr(plan, "MAX_TOP", 128)
    formats = {"q_fp8": fp8, "k_fp8": fp8}
    case = make_indexer_case(lengths, s_q=s_q, heads=8, device=device, **formats)
    scores = indexer_scores(*case.args, impl="triton")
    out = torch.full((len(case.q), k), 55, dtype=torch.int32, device=device)
    fused = indexer_topk(*case.args, k, out=out, impl="triton")
    assert fused is out
    assert torch.equal(fused, exact_topk(scores, k, impl="triton"))
    assert torch.equal(fused.cpu(), indexer_topk(*case.args, k, impl="reference").cpu())
    assert torch.equal(fused.cpu(), indexer_topk(*case.args, k, impl="torch").cpu())


def test_fused_in_turns_when_the_workspace_is_small(device, monkeypatch):
    from mla_kernels.indexer import workspace

    for case in (
        make_indexer_case([200, 90], s_q=3, heads=8, device=device),
        make_indexer_case([200, 90], chunks=[5, 9], heads=8, device=device),
    ):
        want = indexer_topk(*case.args, 50, **case.rows, impl="triton")
        max_blocks = case.block_table.shape[1]
        row = workspace.indexer_topk_workspace(1, max_blocks, torch.device(device))
        small = torch.empty(4 * row.numel(), dtype=torch.uint8, device=device)
        got = indexer_topk(*case.args, 50, **case.rows, workspace=small, impl="triton")
        assert torch.equal(got, want)
    monkeypatch.setattr(workspace, "MAX_WORKSPACE_BYTES", 1)
    assert torch.equal(indexer_topk(*case.args, 50, **case.rows, impl="triton"), want)
    with pytest.raises(ValueError, match=r"workspace of at least .* bytes"):
        indexer_topk(*case.args, 50, **case.rows, workspace=small[:100], impl="triton")


@pytest.mark.parametrize("hopper", [False, True])
@pytest.mark.parametrize("how", [{"s_q": 3}, {"chunks": [5, 9]}])
def test_turns_take_the_tile_of_the_whole_call(how, hopper, device, monkeypatch):
    """Of other tiles the sums over the heads have other bits."""
    from mla_kernels import indexer_topk_workspace

    case = make_indexer_case([200, 90], heads=8, device=device, **how)
    rows = []

    def noted(kernel, *args, ROWS, **constants):
        rows.append(ROWS)
        if not hopper:
            launch(kernel, *args, ROWS=ROWS, **constants)

    launch = launcher.launch
    monkeypatch.setattr(launcher_hopper if hopper else launcher, "launch", noted)
    if device == "cpu":
        sms = types.SimpleNamespace(multi_processor_count=1)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: sms)
    lengths = indexer_lengths(case.seq_lens, len(case.q), **case.rows)
    one = indexer_topk_workspace(1, case.block_table.shape[1], torch.device(device))
    for room in (None, torch.empty(4 * one.numel(), dtype=torch.uint8, device=device)):
        fused_form.indexer_topk_fused(
            case.q, case.k_cache, case.weights, case.block_table, lengths, 50,
            request_ids=case.request_ids, workspace=room, hopper=hopper,
        )  # fmt: skip
    assert len(rows) > 2 and len(set(rows)) == 1 and rows[0] > 1


@pytest.mark.parametrize("impl", [*IMPLS, "reference"])
@pytest.mark.parametrize("turns", [False, True])
def test_values_are_the_scores_of_the_chosen_keys(turns, impl, device):
    """Bit for bit, also where the scores of a turn overwrite those of the one before."""
    from mla_kernels import indexer_topk_workspace

    case = make_indexer_case([200, 90, 3, 0], chunks=[5, 9, 1, 0], heads=8, device=device)
    T, k, max_blocks = len(case.q), 50, case.block_table.shape[1]
    both = torch.full((T, 2, k), 7, dtype=torch.int32, device=device)
    chosen, values = both[:, 0], both[:, 1].view(torch.float32)
    row = indexer_topk_workspace(1, max_blocks, torch.device(device))
    small = torch.empty(4 * row.numel(), dtype=torch.uint8, device=device) if turns else None
    options = {**case.rows, "impl": impl}
    found = indexer_topk(*case.args, k, out=chosen, values=values, workspace=small, **options)
    assert torch.equal(found, indexer_topk(*case.args, k, **options))
    scores = indexer_scores(*case.args, **options)
    want = scores.gather(1, chosen.clamp(min=0).long()).masked_fill(chosen < 0, -INF)
    assert torch.equal(values.view(torch.int32), want.view(torch.int32))
    assert (want > -INF).any() and (want == -INF).any()


@pytest.mark.parametrize("impl", [*IMPLS, "reference"])
def test_values_without_a_page(impl, device):
    case = make_indexer_case([0], heads=8, spare_blocks=0, device=device)
    values = torch.zeros(1, 4, device=device)
    indexer_topk(*case.args, 4, values=values, impl=impl)
    assert (values == -INF).all()


def test_a_hundred_fused_runs_agree(device):
    case = make_indexer_case([130, 64], heads=4, device=device)
    case.weights.zero_()  # every score ties
    first = indexer_topk(*case.args, 20, impl="triton")
    assert first[0].tolist() == list(range(20))
    for _ in range(100 if device == "cuda" else 10):  # the interpreter runs in order
        assert torch.equal(indexer_topk(*case.args, 20, impl="triton"), first)


def test_no_rows(device):
    case = make_indexer_case([], heads=8, device=device)
    for impl in IMPLS:
        assert indexer_scores(*case.args, impl=impl).shape == (0, 128)
        assert indexer_topk(*case.args, 5, impl=impl).shape == (0, 5)


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


def test_the_forms_of_both_caches_are_compiled_offline():
    """Those of `indexer_topk`, whose scores prepare the top-k or not, and of rows that name their
    request."""
    forms = {(c.k_fp8, c.q_fp8, c.ragged, c.split, c.levels) for c in specs.SCORES}
    for fp8 in (True, False):
        assert {(fp8, fp8, False, True, levels) for levels in (True, False)} <= forms
        assert (fp8, fp8, True, False, False) in forms
    assert {(True, True, True, True, levels) for levels in (True, False)} <= forms
    assert {(False, True, False, True, False), (True, False, False, True, False)} <= forms


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


def test_topk_refusals():
    case = make_indexer_case([60, 3], s_q=2, heads=8)
    for k in (0, 2049):
        with pytest.raises(ValueError, match=f"k in 1..2048, got {k}"):
            indexer_topk(*case.args, k)
    with pytest.raises(ValueError, match=r"out of shape \[4, 6\]"):
        indexer_topk(*case.args, 6, out=torch.zeros(4, 5, dtype=torch.int32))


def test_the_reference_chooses_by_the_scores_that_it_gives():
    """In fp64 the second is larger, as fp32 it is the same: the first of equals is chosen."""
    q = torch.zeros(1, 1, 128).bfloat16()
    q[0, 0, 0], q[0, 0, 1] = 1, 2.0**-30
    k_cache = torch.zeros(1, 64, 128).bfloat16()
    k_cache[0, :2, 0] = k_cache[0, 1, 1] = 1
    args = (q, k_cache, torch.ones(1, 1), torch.zeros(1, 1).int(), torch.tensor([2]).int())
    scores = indexer_scores(*args, impl="reference")
    assert indexer_topk(*args, 1, impl="reference").tolist() == [[0]]
    assert exact_topk(scores, 1, impl="reference").tolist() == [[0]]


@pytest.mark.parametrize("impl", ["torch", "reference"])
def test_nothing_is_recorded_for_gradients(impl):
    case = make_indexer_case([70], heads=4)
    weights = case.args[2].requires_grad_()
    args = (*case.args[:2], weights, *case.args[3:])
    assert not indexer_scores(*args, impl=impl).requires_grad
