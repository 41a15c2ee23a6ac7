# SPDX-License-Identifier: Apache-2.0
"""Which request a token of a step belongs to, and how many keys it sees."""

import pytest
import torch
from mla_kernels.indexer import rows
from mla_kernels.indexer.rows import token_rows

STEPS = [  # (new tokens of each request, their lengths, tokens with padding)
    ([1, 5, 1, 17], [70, 5, 1, 200], 24),
    ([3, 0, 0, 2], [3, 9, 0, 300], 5),
    ([2, 1, 0], [65, 64, 0], 8),
    ([1], [1], 1),
    ([0], [7], 3),
    ([], [], 3),
    ([600], [131072], 600),
    ([1] * 257, list(range(1, 258)), 300),
]


def expected(new, lengths, tokens):
    ids = [b for b, count in enumerate(new) for _ in range(count)]
    seen = [n for count, n in zip(new, lengths, strict=True) for n in range(n - count + 1, n + 1)]
    padding = tokens - len(ids)
    return ids + [-1] * padding, seen + [0] * padding


@pytest.mark.parametrize("kernel", [True, False])
@pytest.mark.parametrize("step", STEPS, ids=str)
def test_rows_of_a_step(kernel, step, device, monkeypatch):
    if not kernel and device != "cpu":
        pytest.skip("torch is for CPUs")
    monkeypatch.setattr(rows, "triton_refusal", lambda _: None if kernel else "in torch")
    new, lengths, tokens = step
    starts = torch.tensor([0, *new], device=device).cumsum(0).int()
    ids = torch.full((tokens + 7,), -7, dtype=torch.int32, device=device)
    seen = ids.clone()
    token_rows(
        starts,
        torch.tensor(lengths, dtype=torch.int32, device=device),
        request_ids=ids[:tokens],
        lengths=seen[:tokens],
    )
    want_ids, want_seen = expected(new, lengths, tokens)
    assert ids[:tokens].tolist() == want_ids
    assert seen[:tokens].tolist() == want_seen
    assert (ids[tokens:] == -7).all()
    assert (seen[tokens:] == -7).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query_start_loc": torch.zeros(2, dtype=torch.int32)}, "query_start_loc"),
        ({"seq_lens": torch.zeros(2)}, "seq_lens"),
        ({"seq_lens": torch.zeros(2, 1, dtype=torch.int32)}, "seq_lens of shape"),
        ({"request_ids": torch.zeros(4, dtype=torch.int64)}, "request_ids"),
        ({"request_ids": torch.zeros(4, 1, dtype=torch.int32)}, "request_ids of shape"),
        ({"request_ids": torch.zeros(8, dtype=torch.int32)[::2]}, "request_ids with a contiguous"),
        ({"lengths": torch.zeros(3, dtype=torch.int32)}, "lengths"),
        ({"lengths": torch.zeros(8, dtype=torch.int32)[::2]}, "lengths with a contiguous"),
        ({"lengths": torch.zeros(4, dtype=torch.int32, device="meta")}, "lengths on cpu"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(change, message):
    arguments = {
        "query_start_loc": torch.zeros(3, dtype=torch.int32),
        "seq_lens": torch.zeros(2, dtype=torch.int32),
        "request_ids": torch.zeros(4, dtype=torch.int32),
        "lengths": torch.zeros(4, dtype=torch.int32),
    } | change
    starts, seq_lens = arguments.pop("query_start_loc"), arguments.pop("seq_lens")
    with pytest.raises(ValueError, match=message):
        token_rows(starts, seq_lens, **arguments)
