# SPDX-License-Identifier: Apache-2.0
"""Scores and top-k in one call: the choice of the two steps, bit for bit."""

import types

import pytest
import torch
from mla_kernels import exact_topk, indexer_lengths, indexer_scores, indexer_topk
from mla_kernels.indexer import fused as fused_form
from mla_kernels.indexer.hopper import launcher as launcher_hopper
from mla_kernels.indexer.triton import launcher
from mla_kernels.testing.indexer_case import make_indexer_case
from mla_kernels.topk import plan
from mla_kernels.topk.triton import many_launcher, spread_launcher

from tests.kernels.indexer.expected_scores import IMPLS, INF


@pytest.mark.parametrize("fp8", [True, False])
@pytest.mark.parametrize(("k", "lengths"), [(37, [130, 0, 1, 64]), (70, [700, 65])])
@pytest.mark.parametrize(("s_q", "how"), [(1, "levels"), (2, "levels"), (1, "many"), (1, "shared")])
def test_fused_equals_the_two_steps_bit_for_bit(s_q, how, lengths, k, fp8, device, monkeypatch):
    programs = {"levels": 0, "many": 1, "shared": 100}[how]
    for of in (many_launcher, spread_launcher):
        monkeypatch.setattr(of, "resident_programs", lambda device: programs)
    monkeypatch.setattr(plan, "SPREAD_CHUNKS", (256,))
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
        out = torch.empty(len(case.q), 50, dtype=torch.int32, device=device)
        fused_form.indexer_topk_fused(
            case.q, case.k_cache, case.weights, case.block_table, lengths, out,
            request_ids=case.request_ids, workspace=room, hopper=hopper,
        )  # fmt: skip
    assert len(rows) > 2 and len(set(rows)) == 1 and rows[0] > 1


@pytest.mark.parametrize("rows", [17, 40])
def test_rows_that_the_workspace_holds_take_one_turn(rows, device, monkeypatch):
    turns, select = [], fused_form.exact_topk_triton
    monkeypatch.setattr(
        fused_form, "exact_topk_triton", lambda *a, **o: turns.append(select(*a, **o))
    )
    case = make_indexer_case([rows], chunks=[rows], heads=8, device=device)
    indexer_topk(*case.args, 5, impl="triton", **case.rows)
    assert [len(chosen) for chosen in turns] == [len(case.q)]


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
