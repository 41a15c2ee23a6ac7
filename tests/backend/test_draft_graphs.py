# SPDX-License-Identifier: Apache-2.0
"""Drafts that vLLM (0.28 and later, second model runner) records as one CUDA graph: it advances
the lengths of a step in place and has its metadata brought up to date in between. Here without a
graph, by steps that are built once and then brought up to date as the graph would.
"""

from types import SimpleNamespace

import pytest
import torch
from sparse_parts import common_metadata
from sparse_ranks import Cluster

from mla_backend import compat
from mla_backend.attention.metadata import MlaMetadataBuilder
from mla_backend.attention.shard import Shard
from tests.backend.test_dealt_drafts import DRAFTS, MTP, TABLE, make_step
from tests.backend.test_drafted_batches import make_builder


class Advance:
    """One step of vLLM's loop over drafts, or the replay of its graph for another batch."""

    def __init__(self, common):
        self.common = common

    def more(self):
        self.common.seq_lens[self.common.seq_lens > 0] += 1

    def fewer_requests(self):
        """The last one of the batch is padding now."""
        self.common.query_start_loc[-1] = self.common.query_start_loc[-2]
        self.common.seq_lens[-1] = 0


def dense_builder(monkeypatch, shard=None):
    monkeypatch.setattr(compat, "deal_draft_slots", lambda _: None)
    how = {"threshold": 1 + DRAFTS, "drafts": DRAFTS, **MTP}
    return make_builder(monkeypatch, 0, shard=shard or Shard(), **how)


@pytest.fixture
def updates(monkeypatch):
    """What plans are updated with, as it is then."""
    from mla_kernels import MlaDecodePlan

    seen, update = [], MlaDecodePlan.update

    def watched(plan, seq_lens):
        seen.append((plan, seq_lens.tolist()))
        update(plan, seq_lens)

    monkeypatch.setattr(MlaDecodePlan, "update", watched)
    return seen


def test_a_dense_plan_follows_the_lengths(monkeypatch, updates):
    made = dense_builder(monkeypatch)
    common = make_step([300, 6], [1, 1], TABLE[:2])
    metadata, advance = made.build(0, common), Advance(common)
    updates.clear()
    for change, lengths in ((advance.more, [301, 7]), (advance.fewer_requests, [301, 0])):
        change()
        made.update_draft_decode_metadata(metadata)
        assert updates.pop() == (metadata.decode.plan, lengths)
        assert metadata.decode.lengths.tolist() == lengths
    assert not updates


def test_requests_that_pad_no_graph_have_no_token(monkeypatch, updates):
    """As vLLM 0.32 builds a batch whose number of drafts has no graph: of a captured size."""
    made = dense_builder(monkeypatch)
    common = make_step([300, 6, 0], [1, 1, 0], TABLE[:2])
    metadata = made.build(0, common)
    updates.clear()
    Advance(common).more()
    made.update_draft_decode_metadata(metadata)
    assert [lengths for _, lengths in updates] == [[301, 7]]
    assert metadata.decode.tokens == 2


def test_a_step_of_prompts_alone_has_no_plan(monkeypatch, updates):
    made = dense_builder(monkeypatch)
    metadata = made.build(0, make_step([300], [300], TABLE[:1]))
    updates.clear()
    made.update_draft_decode_metadata(metadata)
    assert metadata.decode is None and not updates


@pytest.mark.parametrize("which", [0, 1])  # the indexer's builder and the attention's
def test_rows_of_a_sparse_layer_follow_the_lengths(monkeypatch, which):
    def build(common):
        common.slot_mapping = torch.zeros(3, dtype=torch.int64)
        return rank.builders[which].build(0, common)

    rank = Cluster(monkeypatch, 1, 1).ranks[0]
    common = common_metadata([1, 1, 1], [5, 200, 64])
    metadata, advance = build(common), Advance(common)
    places = metadata.rows.lengths.data_ptr(), metadata.rows.seq_lens.data_ptr()
    assert places[1] == common.seq_lens.data_ptr()
    for change, lengths in ((advance.more, [6, 201, 65]), (advance.fewer_requests, [6, 201, 0])):
        change()
        rank.builders[which].update_draft_decode_metadata(metadata)
        assert metadata.rows.lengths.tolist() == lengths
        last = rank.builders[which]._rows._request_ids[2]
        assert last == (2 if lengths[2] else -1)
    assert places == (metadata.rows.lengths.data_ptr(), metadata.rows.seq_lens.data_ptr())


def test_where_drafts_are_one_graph(monkeypatch):
    """Not where a rank has every so many tokens of a request, nor where each step is checked."""

    def builders(size):
        yield dense_builder(monkeypatch, Shard(size))
        yield from Cluster(monkeypatch, size, 1).ranks[0].builders

    def joining(size):
        return [made.supports_draft_decode_metadata_update for made in builders(size)]

    assert joining(1) == [True] * 3
    assert joining(2) == [False] * 3
    monkeypatch.setenv("MLA_BACKEND_CHECK", "1")
    spec = SimpleNamespace(block_size=64)
    monkeypatch.setattr(MlaMetadataBuilder, "kv_cache_spec", spec, raising=False)
    assert joining(1) == [False, True, False]  # the indexer's steps are the attention's
