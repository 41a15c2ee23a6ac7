# SPDX-License-Identifier: Apache-2.0
"""Which sparse attention kernels "auto" may take: what a batch says of itself."""

import pytest
import torch
from mla_kernels import mla_sparse_attention
from mla_kernels.sparse import api, choice


@pytest.fixture
def offered(monkeypatch):
    """Calls of choose_impl: the implementations that it was offered."""
    calls, choose = [], choice.choose_impl

    def record(*args, available, **options):
        calls.append(available)
        return choose(*args, available=available, **options)

    monkeypatch.setattr(choice, "choose_impl", record)
    return calls


@pytest.mark.parametrize(
    ("tokens", "heads", "options", "hopper"),
    [
        (1, 16, {}, False),
        (1, 17, {}, True),
        (2, 16, {}, True),
        (1, 16, {"deterministic": True}, True),
        (1, 16, {"impl": "torch"}, True),
    ],
)
def test_one_token_of_few_heads_is_for_the_portable_kernel(offered, tokens, heads, options, hopper):
    q = torch.zeros(tokens, heads, 576, dtype=torch.bfloat16)
    cache = torch.zeros(1, 64, 576, dtype=torch.bfloat16)
    slots = torch.zeros(tokens, 1, dtype=torch.int32)
    mla_sparse_attention(q, cache, slots, scale=1.0, **options)
    assert [("hopper" in available) for available in offered] == [hopper]
    assert "triton" in offered[0]


def test_rows_that_start_between_16_bytes_are_not_aligned():
    row = torch.zeros(1, 64, 577, dtype=torch.bfloat16)
    assert api._rows_aligned(row[..., :576].contiguous())
    assert not api._rows_aligned(row[..., :576])
