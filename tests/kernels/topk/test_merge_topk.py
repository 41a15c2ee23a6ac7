# SPDX-License-Identifier: Apache-2.0
"""merge_topk: ranks that share out the tokens of a row choose what one with all of them would."""

import pytest
import torch
from mla_kernels import exact_topk, merge_topk
from mla_kernels.testing.graphs import captured

from tests.kernels.topk.test_exact_topk import KINDS, rows_of

IMPLS = ["reference", "torch", "triton"]
LAYOUTS = [(2, 1), (4, 1), (2, 64), (4, 64), (3, 2), (1, 1)]


def candidates_of(scores, k, ranks, interleave):
    """[ranks, T, 2, k]: what each rank finds among its own scores; the score of none is junk."""
    owner = torch.arange(scores.shape[1]) // interleave % ranks
    found = []
    for rank in range(ranks):
        own = scores[:, owner == rank]
        local = exact_topk(own, k, impl="torch")
        score = torch.full(local.shape, torch.inf)
        if own.shape[1]:
            score = own.gather(1, local.clamp(min=0).long()).masked_fill(local < 0, torch.inf)
        found.append(torch.stack([local, score.view(torch.int32)], 1))
    return torch.stack(found)


def shares_of(scores, k, ranks, interleave):
    """What each rank has of the top-k of all scores."""
    best = exact_topk(scores, k, impl="reference")
    shares = torch.full((ranks, len(scores), k), -1, dtype=torch.int32)
    for t, row in enumerate(best):
        chosen = row[row >= 0]
        for rank in range(ranks):
            own = chosen[chosen // interleave % ranks == rank]
            local = own // (ranks * interleave) * interleave + own % interleave
            shares[rank, t, : len(own)] = local
    return shares


def check(scores, k, ranks, interleave, impl, device):
    candidates = candidates_of(scores, k, ranks, interleave).to(device)
    before = candidates.clone()
    want = shares_of(scores, k, ranks, interleave)
    for rank in range(ranks):
        out = torch.full((len(scores), 2, k), 123456789, dtype=torch.int32, device=device)
        got = merge_topk(candidates, rank, interleave=interleave, out=out[:, 0], impl=impl)
        assert torch.equal(got.cpu(), want[rank]) and (out[:, 1] == 123456789).all()
    assert torch.equal(candidates, before)
    return want


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("impl", IMPLS)
def test_ranks_choose_as_one(impl, kind, device):
    g = torch.Generator().manual_seed(0)
    for ranks, interleave, n, k in ((2, 1, 300, 40), (4, 64, 700, 100), (3, 2, 90, 64)):
        check(rows_of(kind, 2, n, g), k, ranks, interleave, impl, device)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(("ranks", "interleave"), LAYOUTS)
def test_rows_of_few_tokens(impl, ranks, interleave, device):
    """Fewer than are chosen, none on some ranks, none at all."""
    g = torch.Generator().manual_seed(1)
    for n in (0, 1, 3, 65, 129):
        want = check(rows_of("few", 1, n, g), 48, ranks, interleave, impl, device)
        assert (want >= 0).sum() == min(n, 48)


@pytest.mark.parametrize("impl", IMPLS)
def test_equal_scores_go_to_the_lowest_positions(impl, device):
    """Whichever rank has them, and -0 is 0."""
    zeros = torch.tensor([0.0, -0.0]).repeat(50)[None]
    for interleave, held in ((1, [10, 10]), (16, [16, 4])):
        want = check(zeros, 20, 2, interleave, impl, device)
        assert (want >= 0).sum(2)[:, 0].tolist() == held
    above = torch.zeros(1, 100)
    above[0, 99] = 1.0  # the only one above the ties, on the last rank
    want = check(above, 7, 4, 1, impl, device)
    assert (want >= 0).sum(2)[:, 0].tolist() == [2, 2, 1, 2]


@pytest.mark.parametrize("impl", IMPLS)
def test_a_rank_with_all_of_the_best(impl, device):
    scores = torch.arange(400.0)[None] + torch.where(torch.arange(400) % 2 == 1, 1000.0, 0.0)
    want = check(scores, 64, 2, 1, impl, device)
    assert (want[0] == -1).all() and (want[1] >= 0).all()


def test_the_largest_k(device):
    g = torch.Generator().manual_seed(2)
    for ranks in (2, 3):
        check(rows_of("few", 1, 9000, g), 2048, ranks, 64, "triton", device)


def test_positions_of_long_requests(device):
    """Beyond 2^24, where a float would lose the last bit."""
    local = torch.tensor([2**20 - 2, 2**20 - 1])
    candidates = torch.empty(32, 1, 2, 2, dtype=torch.int32)
    candidates[:, 0, 0] = local
    candidates[:, 0, 1] = torch.zeros(2).view(torch.int32)
    candidates = candidates.to(device)
    for impl in ("torch", "triton"):
        for rank, own in ((0, [2**20 - 2, -1]), (1, [2**20 - 2, -1]), (2, [-1, -1])):
            assert merge_topk(candidates, rank, impl=impl).tolist() == [own]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"candidates": torch.zeros(2, 3, 8, dtype=torch.int32)}, "candidates"),
        ({"candidates": torch.zeros(2, 3, 2, 8)}, "candidates"),
        ({"candidates": torch.zeros(2, 3, 2, 9, dtype=torch.int32)[..., :8]}, "candidates"),
        ({"candidates": torch.zeros(2, 3, 2, 2049, dtype=torch.int32)}, r"k .*2048"),
        ({"candidates": torch.zeros(9, 1, 2, 2048, dtype=torch.int32)}, r"ranks .*8"),
        ({"rank": 2}, r"rank .*0\.\.1"),
        ({"rank": -1}, r"rank .*0\.\.1"),
        ({"interleave": 0}, "interleave"),
        ({"out": torch.zeros(3, 7, dtype=torch.int32)}, "out"),
        ({"out": torch.zeros(3, 8)}, "out"),
        ({"impl": "hopper"}, "impl of merge_topk"),
    ],
)
def test_what_does_not_fit_is_refused(changes, said):
    call = {"candidates": torch.zeros(2, 3, 2, 8, dtype=torch.int32), "rank": 0}
    with pytest.raises(ValueError, match=said):
        merge_topk(**call | changes)


def test_no_row():
    assert merge_topk(torch.zeros(2, 0, 2, 8, dtype=torch.int32), 1).shape == (0, 8)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize(("ranks", "rows"), [(2, 4), (4, 200), (8, 1)])
def test_in_a_graph(ranks, rows, only_launches):
    """Captured once, replayed with other candidates; nothing is allocated."""
    g = torch.Generator().manual_seed(3)

    def load():
        scores = rows_of("few", rows, 20000, g)
        return candidates_of(scores, 2048, ranks, 64), shares_of(scores, 2048, ranks, 64)

    first, _ = load()
    candidates = first.cuda()
    out = torch.empty(rows, 2048, dtype=torch.int32, device="cuda")

    def call():
        merge_topk(candidates, ranks - 1, interleave=64, out=out)

    graph, _ = captured(call)
    with only_launches():
        call()
    for _ in range(3):
        now, want = load()
        candidates.copy_(now)
        graph.replay()
        assert torch.equal(out.cpu(), want[-1])
