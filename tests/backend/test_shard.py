# SPDX-License-Identifier: Apache-2.0
"""Which tokens a rank has of a request, beside vLLM's own formula and tokens dealt one by one."""

from types import SimpleNamespace

import pytest
import torch
from vllm.v1.attention.backends.utils import get_dcp_local_seq_lens
from vllm.v1.spec_decode import llm_base_proposer

from mla_backend import compat
from mla_backend.attention.shard import Shard

BLOCK, MAX_LEN = 64, 700
EVERY = pytest.mark.parametrize(
    "size, interleave", [(2, 1), (4, 1), (8, 1), (2, 2), (4, 2), (2, 64), (4, 64), (8, 64)]
)


@EVERY
def test_lengths_are_vllms(size, interleave):
    total = torch.arange(1300, dtype=torch.int32)
    spare = torch.full_like(total, 7)
    shares = []
    for rank in range(size):
        shard = Shard(size, rank, interleave)
        out = torch.full_like(total, -7)
        assert shard.lengths(total, out=out, spare=spare) is out
        assert out.equal(get_dcp_local_seq_lens(total, size, rank, interleave))
        in_place = total.clone()
        shard.lengths(in_place, out=in_place, spare=spare)
        assert in_place.equal(out)
        shares.append(out)
    assert sum(shares).equal(total)


def test_one_rank_has_all():
    total = torch.arange(200)
    assert Shard().lengths(total, out=total.clone(), spare=total.clone()).equal(total)


def dealt(shard, position):
    """A token's place among those of its rank, None if it is not `shard`'s."""
    turns = [p // shard.interleave % shard.size for p in range(position + 1)]
    return turns[:-1].count(shard.rank) if turns[-1] == shard.rank else None


def slot(shard, table, position):
    """Of a token, by a request's row of the block table; -1 for another rank's."""
    place = dealt(shard, position)
    return -1 if place is None else int(table[place // BLOCK]) * BLOCK + place % BLOCK


@EVERY
def test_slots(size, interleave):
    """Up to the last token that a block table has room for."""
    columns = 512 // BLOCK // size
    table = torch.randperm(16, generator=torch.Generator().manual_seed(0)).int()
    table = table[: 2 * columns].view(2, columns)
    positions = torch.tensor([0, 1, 63, 64, 127, 128, 129, 500, 501, 511])
    requests = torch.tensor([0, 1] * 5)
    for rank in range(size):
        shard = Shard(size, rank, interleave)
        got = shard.slots(positions, table, requests, BLOCK)
        pairs = zip(positions.tolist(), requests.tolist(), strict=True)
        assert got.dtype == torch.int64
        assert got.tolist() == [slot(shard, table[r], p) for p, r in pairs]


def stock_step(calls):
    """vLLM's own step of a drafter, as its kernel computes it."""

    def step(*, positions_1d, block_table_tensor, seq_lens, block_size, max_model_len,
             out_clamped_positions, out_slot_mapping, input_batch_size):  # fmt: skip
        calls.append(input_batch_size)
        new = positions_1d + 1
        beyond = new >= max_model_len
        new = new.masked_fill(beyond, 0)
        columns = (new // block_size).clamp(max=block_table_tensor.shape[1] - 1)
        blocks = block_table_tensor.gather(1, columns[:, None])[:, 0]
        out_slot_mapping.fill_(-1)
        slots = blocks.long() * block_size + new % block_size
        out_slot_mapping[: len(new)] = slots.masked_fill(beyond, -1)
        out_clamped_positions.copy_(new)
        seq_lens += 1

    return step


@pytest.mark.parametrize("shard", [Shard(2, 0), Shard(2, 1), Shard(4, 3), Shard(2, 1, 2)])
def test_later_drafts_are_written_where_the_rank_has_them(monkeypatch, shard):
    """By the first model runner's drafter, which believes that every rank has every token."""
    calls, name = [], "eagle_step_update_slot_mapping_and_metadata"
    monkeypatch.setattr(llm_base_proposer, name, stock_step(calls))
    compat.deal_draft_slots(Shard(8, 5).slots)
    compat.deal_draft_slots(shard.slots)  # the engine's last builder decides; the others are its
    positions = torch.tensor([0, 1, 126, 127, 128, 300, MAX_LEN - 1])
    table = torch.randperm(77, generator=torch.Generator().manual_seed(0)).int().view(7, 11)
    buffer, lengths = torch.full((9,), 99), (positions + 1).int()
    out = torch.zeros_like(positions)
    proposer = SimpleNamespace(
        positions=out, _slot_mapping_buffer=buffer, max_model_len=MAX_LEN, uses_mrope=False,
        uses_xdrope_dim=0, draft_uses_xdrope_dim=0,
    )  # fmt: skip
    common = SimpleNamespace(
        block_table_tensor=table, seq_lens=lengths, max_seq_len=MAX_LEN, _seq_lens_cpu=None,
        _num_computed_tokens_cpu=None, seq_lens_cpu_upper_bound=None,
    )  # fmt: skip
    step = llm_base_proposer.SpecDecodeBaseProposer._update_positions_dependent_metadata
    step(proposer, positions, common, 7, 9, BLOCK)
    assert calls == [9] and lengths.tolist() == (positions + 2).tolist()
    assert out.tolist() == [1, 2, 127, 128, 129, 301, 0]
    expected = [slot(shard, table[i], p) for i, p in enumerate(out.tolist())]
    expected[-1] = -1  # beyond the model's longest request
    assert buffer.tolist() == [*expected, -1, -1]
