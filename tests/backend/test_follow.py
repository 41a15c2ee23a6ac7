# SPDX-License-Identifier: Apache-2.0
"""What judges the choices of an indexer: that it sees a wrong one. And the records it reads."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from choices import by_request, rows_of_requests
from follow import Follow

TOPK, T = 8, 40


@pytest.fixture
def case():
    """(scores [T, T], choices [T, TOPK]): each row of the tokens it sees, the best first."""
    scores = torch.randn(T, T, generator=torch.Generator().manual_seed(0))
    seen = scores.masked_fill(torch.ones(T, T).triu(1).bool(), -torch.inf)
    best, choices = seen.topk(TOPK)
    return scores, choices.masked_fill(best.isinf(), -1)


def gaps_of(scores, choices):
    follow = Follow(None)
    follow.check(scores, choices, torch.arange(T), TOPK)
    return torch.tensor(follow.gaps)


def test_own_choices_have_no_gap(case):
    gaps = gaps_of(*case)
    assert len(gaps) == T - TOPK  # rows before read every token
    assert (gaps < 0).all()


def test_gap_is_that_of_the_two_tokens_swapped(case):
    scores, choices = case
    row = scores[30, :31]
    order = row.argsort(descending=True)
    choices[30, 7] = order[8]  # the next best: nearly a tie
    choices[31, 0] = scores[31, :32].argmin()  # the worst in place of the best
    gaps = gaps_of(scores, choices)
    assert gaps[30 - TOPK].isclose((row[order[7]] - row[order[8]]) / row.std())
    assert gaps[31 - TOPK] > 3
    assert (gaps > 0).sum() == 2


@pytest.mark.parametrize(
    "token, refusal",
    [(31, "of the future"), (None, "chosen twice"), (-1, "not at all")],
)
def test_what_is_no_choice_is_refused(case, token, refusal):
    scores, choices = case
    choices[30, 3] = choices[30, 4] if token is None else token
    with pytest.raises(AssertionError, match=refusal):
        gaps_of(scores, choices)


def test_a_token_too_many_is_refused(case):
    scores, choices = case
    choices[3, 7] = choices[3, 0]
    with pytest.raises(AssertionError, match="too many"):
        gaps_of(scores, choices)


def test_rows_are_those_of_the_step_or_one_a_request():
    starts = SimpleNamespace(np=np.array([0, 5, 6, 9, 9, 9]))
    runner = SimpleNamespace(input_batch=SimpleNamespace(num_reqs=3), query_start_loc=starts)
    assert rows_of_requests(runner, 9) == [5, 1, 3]
    assert rows_of_requests(runner, 3) == [1, 1, 1]  # drafts after the first
    with pytest.raises(RuntimeError, match="16 rows"):
        rows_of_requests(runner, 16)


def test_records_are_of_the_tokens_that_stayed():
    def call(first, n, value):
        rows = torch.full((n, 2), value, dtype=torch.int16)
        return torch.arange(first, first + n), rows

    first = {"prompt": [5, 6, 7], "tokens": [8, 9], "cached": 0}
    # Position 3 is a draft at first; 4 was never fed back.
    chosen = {"a-0-f00": {1: [call(0, 4, 3)], 0: [call(0, 4, 1), call(3, 2, 2)]}}
    known = []
    (rows,) = by_request(chosen, [first], "a", known)
    assert rows[:, :, 0].tolist() == [[1, 1, 1, 2], [3, 3, 3, 3]]

    second = {"prompt": [5, 6, 4], "tokens": [8], "cached": 2}
    again = {"b-0": {0: [call(2, 1, 6)], 1: [call(2, 1, 7)]}}
    (rows,) = by_request(again, [second], "b", known)
    assert rows[:, :, 0].tolist() == [[1, 1, 6], [3, 3, 7]]
    with pytest.raises(RuntimeError, match="no indexer was called"):
        by_request({}, [second], "c", known)
