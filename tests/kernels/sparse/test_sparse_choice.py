# SPDX-License-Identifier: Apache-2.0
"""Which sparse attention kernels "auto" may take: what a batch says of itself."""

import pytest
import torch
from mla_kernels import checks, mla_sparse_attention
from mla_kernels.sparse import choice


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
    ("tokens", "heads", "cache", "options", "hopper"),
    [
        (1, 16, "bf16", {}, False),
        (1, 17, "bf16", {}, True),
        (2, 16, "bf16", {}, True),
        (1, 16, "bf16", {"deterministic": True}, True),
        (1, 16, "bf16", {"impl": "torch"}, True),
        (1, 32, "fp8_ds_mla", {}, False),
        (1, 33, "fp8_ds_mla", {}, True),
        (7, 16, "fp8_ds_mla", {}, False),
        (7, 17, "fp8_ds_mla", {}, True),
        (7, 16, "fp8_ds_mla", {"deterministic": True}, True),
    ],
)
def test_few_rows_are_for_the_portable_kernel(offered, tokens, heads, cache, options, hopper):
    q = torch.zeros(tokens, heads, 576, dtype=torch.bfloat16)
    if cache == "bf16":
        cache = torch.zeros(1, 64, 576, dtype=torch.bfloat16)
    else:
        cache = torch.zeros(1, 64, 656, dtype=torch.uint8)
    slots = torch.zeros(tokens, 1, dtype=torch.int32)
    mla_sparse_attention(q, cache, slots, scale=1.0, **options)
    assert [("hopper" in available) for available in offered] == [hopper]
    assert "triton" in offered[0]


def test_rows_that_start_between_16_bytes_are_not_aligned():
    row = torch.zeros(1, 64, 577, dtype=torch.bfloat16)
    assert checks.rows_aligned(row[..., :576].contiguous())
    assert not checks.rows_aligned(row[..., :576])
