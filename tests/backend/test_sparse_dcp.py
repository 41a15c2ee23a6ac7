# SPDX-License-Identifier: Apache-2.0
"""Sparse layers under decode context parallelism beside one rank that has every token."""

import types

import pytest
import torch
from sparse_ranks import Cluster, Requests, merged, whole_choice

MIXED = ([5, 1, 3, 1], [320, 65, 301, 1])  # a chunk of a prompt, decode tokens, a first token
LAYOUTS = [(2, 1), (4, 1), (8, 1), (2, 64), (4, 64), (3, 2)]


def assert_as_one(monkeypatch, requests, size, interleave, heads=24):
    one = Cluster(monkeypatch, 1, 1, heads)
    ((want, want_out, want_lse),) = one.step(requests)
    cluster = Cluster(monkeypatch, size, interleave, heads)
    results = cluster.step(requests)
    assert torch.equal(whole_choice(results, size, interleave), want)
    out, lse = merged(results)
    padding = want_lse.isneginf()
    assert torch.equal(lse.isneginf(), padding)
    assert (lse - want_lse)[~padding].abs().max() < 1e-6 * want_lse[~padding].abs().max()
    assert (out - want_out).abs().max() < 1e-6 * want_out.abs().max()
    return cluster, results, want


@pytest.mark.parametrize("size, interleave", LAYOUTS)
def test_ranks_choose_and_attend_as_one(monkeypatch, size, interleave):
    heads = {3: 24, 8: 16}.get(size, 8)
    requests = Requests(*MIXED, heads, padding=2)
    cluster, results, want = assert_as_one(monkeypatch, requests, size, interleave, heads)
    assert (want[:5] >= 0).all() and want[-3].tolist() == [0] + [-1] * 95
    assert [group.calls for group in cluster.groups] == [1] * size
    for rank, (_, out, lse) in enumerate(results):
        if rank:  # the request of one token lies on rank 0
            assert lse[9].isneginf().all() and (out[9] == 0).all()


@pytest.mark.parametrize("size, interleave", [(2, 1), (4, 64)])
@pytest.mark.parametrize("seq_lens", [[1], [97], [320, 2, 64, 128]])
def test_decode_steps(monkeypatch, size, interleave, seq_lens):
    """Rows without request ids, one token a request, one request."""
    requests = Requests([1] * len(seq_lens), seq_lens, 8)
    cluster, _, _ = assert_as_one(monkeypatch, requests, size, interleave, 8)
    rank = cluster.ranks[0]
    assert rank.builders[0].build(0, rank.common(requests)[0]).rows.request_ids is None


@pytest.mark.parametrize("at_once, calls", [(1, 8), (2 * 96 * 3, 3), (2 * 96 * 8, 1)])
def test_rows_are_merged_in_turns(monkeypatch, at_once, calls):
    from mla_backend.attention.sparse import dcp

    monkeypatch.setattr(dcp, "MERGED_AT_ONCE", at_once)
    requests = Requests([5, 3], [200, 301], 8)
    cluster, _, _ = assert_as_one(monkeypatch, requests, 2, 1, 8)
    assert [group.calls for group in cluster.groups] == [calls] * 2


@pytest.mark.parametrize("interleave", [1, 64])
def test_equal_scores_go_to_the_lowest_positions(monkeypatch, interleave):
    """Whichever rank has them."""
    requests = Requests([2], [320], 8)
    requests.weights.zero_()
    _, results, want = assert_as_one(monkeypatch, requests, 2, interleave, 8)
    assert want.tolist() == [list(range(96))] * 2
    held = [int((chosen >= 0).sum()) for chosen, _, _ in results]
    assert held == ([96, 96] if interleave == 1 else [128, 64])


def test_a_rank_with_all_of_the_best(monkeypatch):
    """Then the other one reads nothing, however many candidates it brought."""
    requests = Requests([1], [300], 8)
    requests.keys[0][1::2] = 0
    requests.keys[0][::2] = requests.index_q[0, 0].float()
    requests.weights[:] = torch.tensor([1.0, 0, 0, 0])
    _, results, _ = assert_as_one(monkeypatch, requests, 2, 1, 8)
    assert (results[0][0] >= 0).all() and (results[1][0] == -1).all()
    assert results[1][2].isneginf().all() and (results[1][1] == 0).all()


def shard(rank, size, interleave):
    from mla_backend.attention.sparse.dcp import Shard

    config = types.SimpleNamespace(cp_kv_cache_interleave_size=interleave)
    return Shard(rank, size, None, config)


@pytest.mark.parametrize("size, interleave", LAYOUTS)
def test_lengths_are_those_of_vllm(size, interleave):
    from vllm.v1.attention.backends.utils import get_dcp_local_seq_lens

    lengths = torch.arange(600, dtype=torch.int32)
    for rank in range(size):
        want = get_dcp_local_seq_lens(lengths, size, rank, interleave)
        found = shard(rank, size, interleave).local_lengths(lengths, torch.empty_like(lengths))
        assert torch.equal(found, want)
        same = lengths.clone()
        shard(rank, size, interleave).local_lengths(same, out=same)
        assert torch.equal(same, want)


@pytest.mark.parametrize("size, interleave", LAYOUTS)
def test_positions_there_and_back(size, interleave):
    position = torch.arange(600, dtype=torch.int32)
    owners = torch.zeros(600, dtype=torch.int32)
    for rank in range(size):
        of_rank = shard(rank, size, interleave)
        own = position[of_rank.owns(position)]
        owners[own] += 1
        local = of_rank.to_local(own)
        assert torch.equal(local, torch.arange(len(own)).int())
        assert torch.equal(of_rank.to_global(local), own)
    assert (owners == 1).all()
    assert shard(1, 2, 1).to_global(torch.tensor([-1, 0]).int()).tolist() == [2**31 - 1, 1]


def test_rows_of_a_rank_keep_their_addresses(monkeypatch):
    """And vLLM's own lengths are left alone."""
    cluster = Cluster(monkeypatch, 2, 1)
    builder = cluster.ranks[1].builders[0]
    requests = [Requests([2], [5], 8), Requests([1, 2], [64, 7], 8)]
    rows = []
    for step in requests:
        common, _ = cluster.ranks[1].common(step)
        rows.append(builder.build(0, common).rows)
        assert common.seq_lens.tolist() == step.seq_lens
    assert rows[0].lengths.data_ptr() == rows[1].lengths.data_ptr()
    assert rows[0].seq_lens.data_ptr() == rows[1].seq_lens.data_ptr()
    # Of the first 64, 6 and 7 tokens; 32, 2 and 3 if the request's length were shared out first.
    assert rows[1].lengths.tolist() == [32, 3, 3] and rows[1].seq_lens.tolist() == [32, 3]


def test_steps_of_ranks_are_checked(monkeypatch):
    """Slots and tables are those of a rank, of 1 / N as many tokens."""
    from mla_backend.stats import STATS

    monkeypatch.setenv("MLA_BACKEND_CHECK", "1")
    cluster = Cluster(monkeypatch, 2, 1)
    before = STATS.checked_steps
    cluster.step(Requests(*MIXED, 8))
    assert STATS.checked_steps == before + 2
    builder = cluster.ranks[0].builders[1]
    common, _ = cluster.ranks[0].common(Requests(*MIXED, 8))
    common.seq_lens[0] = common.block_table_tensor.shape[1] * 128 + 1
    with pytest.raises(ValueError, match=r"MLA_BACKEND_CHECK: request 0 .*expected a seq_len in"):
        builder.build(0, common)


def test_profiling_takes_what_a_step_takes(monkeypatch):
    """The layers around ours then see no step, and vLLM would give the memory to the cache."""
    from mla_backend.attention.sparse import indexer_layer as module
    from mla_backend.attention.sparse.indexer import run_indexer

    cluster = Cluster(monkeypatch, 2, 1)
    cluster.current.context = types.SimpleNamespace(attn_metadata=None)
    taken, empty = [], torch.empty
    monkeypatch.setattr(
        module.torch, "empty", lambda size, **kwargs: taken.append(size) or empty(0)
    )
    monkeypatch.setattr(module, "MERGED_AT_ONCE", 0)
    q = torch.zeros(50, 4, 128)
    run_indexer(q, q[:, 0], q[..., 0], torch.empty(0), cluster.ranks[1].name)
    assert taken[-1] == 50 * 3 * 8 * 576 * 4  # three times the queries of 8 heads in fp32
    monkeypatch.setattr(module, "MERGED_AT_ONCE", 2**22)
    run_indexer(q, q[:, 0], q[..., 0], torch.empty(0), cluster.ranks[1].name)
    assert taken[-1] == 50 * 8 * 96 + 40 * 2**22


def test_kernel_and_workspace_are_those_of_all_heads(monkeypatch):
    from mla_backend.attention.sparse import impl as module

    asked, make, choose = [], module.attention_workspace, module.SparseKernel.choose
    monkeypatch.setattr(
        module, "attention_workspace", lambda *args: asked.append(args[1]) or make(*args)
    )
    monkeypatch.setattr(
        module.SparseKernel, "choose", lambda *args: asked.append(args[4]) or choose(*args)
    )
    for rank in Cluster(monkeypatch, 4, 1, heads=8).ranks:
        assert (rank.impl.num_heads, rank.impl.query_heads) == (2, 8)
    assert asked == [8] * 2 * 4
