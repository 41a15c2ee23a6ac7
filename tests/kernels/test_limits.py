# SPDX-License-Identifier: Apache-2.0
"""Sizes that kernels, which count in 32 bits, do not take are refused before anything is launched.

Memory that nothing touches takes none.
"""

import pytest
import torch
from mla_kernels import (
    indexer_scores,
    indexer_topk,
    merge_topk,
    mla_decode,
    mla_sparse_attention,
    mla_sparse_workspace,
    positions_to_slots,
)
from mla_kernels.arch import ARCHS
from mla_kernels.decode.triton.launcher import may_prefetch
from mla_kernels.decode.triton.tiles import choose_tile
from mla_kernels.layouts import MlaDims
from mla_kernels.query.api import join_query

CPU = torch.device("cpu")
Q, KV = torch.zeros(1, 2, 576), torch.zeros(1, 64, 576)


def table(blocks):
    return torch.empty(1, blocks, dtype=torch.int32)


def lengths(B):
    return torch.zeros(B, dtype=torch.int32)


@pytest.mark.parametrize("impl", ["torch", "triton"])
@pytest.mark.parametrize(("B", "blocks"), [(1, 2**24 + 1), (256, 2**23)])
def test_decode(B, blocks, impl):
    q, of = Q[:, None].bfloat16().expand(B, 1, 2, 576), table(blocks).expand(B, blocks)
    with pytest.raises(
        ValueError, match=rf"1073741824 tokens .* got {B} requests of {64 * blocks}"
    ):
        mla_decode(q, KV.bfloat16(), of, lengths(B), scale=0.04, impl=impl)


@pytest.mark.parametrize("op", [indexer_scores, indexer_topk])
def test_indexer(op):
    args = torch.zeros(1, 64, 128).bfloat16(), torch.zeros(1, 64, 128).bfloat16()
    args += torch.zeros(1, 64), table(2**24 + 1), lengths(1)
    with pytest.raises(ValueError, match=r"width of scores .* in 0\.\.1073741824, got 1073741888"):
        op(*args, *[40] * (op is indexer_topk))


def test_slots():
    many = torch.empty(1, 2**20 + 1, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"K \(slots.shape\[1\]\) in 0\.\.1048576, got 1048577"):
        mla_sparse_attention(Q, KV, many, scale=0.04)
    with pytest.raises(ValueError, match=r"num_slots in 0\.\.1048576, got 1048577"):
        mla_sparse_workspace(1, 16, 2**20 + 1, device=CPU)
    with pytest.raises(ValueError, match=r"K \(positions.shape\[1\]\) in 0\.\.1048576, got"):
        positions_to_slots(many, table(1))


def test_tokens_of_all_ranks():
    candidates = torch.empty(4096, 1, 2, 1, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"below 2\^31, got 4096 ranks .* interleave 1048576"):
        merge_topk(candidates, 0, interleave=2**20)
    candidates[:, :, 0] = 0  # a token each, of one score
    candidates[:, :, 1] = 0
    assert merge_topk(candidates[:1024].contiguous(), 0, interleave=2**20).tolist() == [[0]]


def test_rows_of_a_query():
    with pytest.raises(ValueError, match=r"T \* H in 0\.\.1073741824, got 1073741952"):
        join_query(torch.empty(1, 128, 8).expand(2**23 + 1, 128, 8), torch.empty(2**23 + 1, 128, 0))


@pytest.mark.parametrize(("apart", "dense"), [(576, True), (584, True), (61 * 576, False)])
def test_what_lies_between_rows_is_not_asked_for(apart, dense):
    """As in blocks of 64 tokens of all layers."""
    cache = torch.empty_strided((2, 64, 576), (64 * apart, apart, 1), device="meta")
    tile = choose_tile(128, MlaDims(), "float", ARCHS[90], "pow2", 64, True)
    assert may_prefetch(cache, tile) is dense and not may_prefetch(cache[:, :16], tile)
