# SPDX-License-Identifier: Apache-2.0
"""Sparse layers under decode context parallelism beside one rank that has every token."""

import functools
import types

import pytest
import sparse_parts
import torch
from sparse_parts import fake_config
from sparse_ranks import Cluster, Requests, merged, whole_choice

from mla_backend.attention.sparse.indexer_layer import attached

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
    from mla_backend.attention.sparse import shared_choice

    monkeypatch.setattr(shared_choice, "MOST_CANDIDATES", at_once)
    for query_lens in ([5, 3], [4, 4]):  # runs of equal length come without request ids
        requests = Requests(query_lens, [200, 301], 8)
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


@pytest.mark.parametrize("size, interleave", LAYOUTS)
def test_lengths_are_those_of_vllm(size, interleave):
    from vllm.v1.attention.backends.utils import get_dcp_local_seq_lens

    from mla_backend.attention.shard import Shard

    lengths = torch.arange(600, dtype=torch.int32)
    for rank in range(size):
        want = get_dcp_local_seq_lens(lengths, size, rank, interleave)
        shard, scratch = Shard(size, rank, interleave), torch.full_like(lengths, 7)
        found = torch.full_like(lengths, 7)
        assert shard.lengths(lengths, out=found, spare=scratch) is found
        assert torch.equal(found, want) and torch.equal(lengths, torch.arange(600).int())
        same = lengths.clone()
        shard.lengths(same, out=same, spare=scratch)
        assert torch.equal(same, want)


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
    # Of the first 64, 6 and 7 tokens; 32, 2 and 3 if the request's length were shared out first.
    assert rows[1].lengths.tolist() == [32, 3, 3] and rows[1].seq_lens.tolist() == [32, 3]


def test_drafts_are_written_where_their_rank_has_them(monkeypatch):
    """By vLLM's drafters, which know of no ranks."""
    from mla_backend import compat
    from mla_backend.attention.shard import Shard

    dealt = []
    monkeypatch.setattr(compat, "deal_draft_slots", lambda slots: dealt.append(slots.__self__))
    Cluster(monkeypatch, 2, 64)
    assert dealt == []
    monkeypatch.setattr(sparse_parts, "fake_config", functools.partial(fake_config, drafts=3))
    Cluster(monkeypatch, 2, 64)
    assert dealt == [Shard(2, 0, 64), Shard(2, 1, 64)]


def test_dummy_steps_without_lengths_of_ranks(monkeypatch):
    """As vLLM's second model runner makes them before 0.30."""
    rank = Cluster(monkeypatch, 2, 1).ranks[1]
    common, _ = rank.common(Requests([1, 2], [64, 7], 8))
    common.dcp_local_seq_lens = None
    for builder in rank.builders:
        assert builder.build(0, common).rows.seq_lens.tolist() == [32, 3]
    assert common.seq_lens.tolist() == [64, 7]


def test_runs_that_vllm_deals_otherwise_are_refused(monkeypatch):
    from mla_backend import compat

    monkeypatch.setattr(compat, "deals_within_64", lambda _: True)
    Cluster(monkeypatch, 2, 64)
    with pytest.raises(ValueError, match=r"--cp-kv-cache-interleave-size 128: .* divides 64, or "):
        Cluster(monkeypatch, 2, 128)


def test_what_a_rank_has_is_what_the_last_builder_was_told(monkeypatch):
    """A KV connector may settle it when the first builders are there."""
    from mla_backend.attention.sparse.metadata import IndexerMetadataBuilder

    rank = Cluster(monkeypatch, 2, 64).ranks[1]
    shared = attached(rank.indexer.k_cache).shared
    assert (shared.shard.rank, shared.shard.interleave) == (1, 64)
    config = fake_config(dcp=2)
    config.parallel_config.cp_kv_cache_interleave_size = 2
    config.compilation_config.max_cudagraph_capture_size = 8
    config.compilation_config.static_forward_context[rank.name] = rank.indexer.k_cache
    spec = types.SimpleNamespace(block_size=64)
    IndexerMetadataBuilder(spec, [rank.name], config, torch.device("cpu"))
    assert shared.shard.interleave == 2


def test_vllm_is_told_which_rows_are_padding(monkeypatch):
    """Before it adds up the ranks' outputs, 0.28 and later read lengths of whole requests."""
    rank = Cluster(monkeypatch, 2, 1).ranks[1]
    common, _ = rank.common(Requests([2, 1], [5, 1], 8, padding=3))
    step = rank.builders[1].build(0, common)
    assert step.num_actual_tokens == step.num_decode_tokens == 6
    assert step.seq_lens.tolist() == [5, 1] and step.query_start_loc.tolist() == [0, 2, 3]


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

    q, taken, nothing = torch.zeros(50, 4, 128), [], torch.empty(0)
    for size in (1, 2):
        cluster = Cluster(monkeypatch, size, 1)
        rank = cluster.ranks[-1]
        cluster.current.context = types.SimpleNamespace(
            attn_metadata=None, no_compile_layers={rank.name: rank.indexer.k_cache}
        )
        with monkeypatch.context() as noted:
            noted.setattr(module.torch, "empty", lambda size, **_: taken.append(size))
            run_indexer(q, q[:, 0], q[..., 0], nothing, rank.name)
    assert taken == [50 * 3 * 8 * 576 * 4]  # of two ranks: queries of 8 heads in fp32


def test_kernel_and_workspace_are_those_of_all_heads(monkeypatch):
    from mla_backend.attention.sparse import impl as module

    asked, make, choose = [], module.attention_workspace, module.SparseKernel.choose
    monkeypatch.setattr(
        module, "attention_workspace", lambda *args: asked.append(args[2]) or make(*args)
    )
    monkeypatch.setattr(
        module.SparseKernel, "choose", lambda *args: asked.append(args[4]) or choose(*args)
    )
    for rank in Cluster(monkeypatch, 4, 1, heads=8).ranks:
        assert (rank.impl.num_heads, rank.impl.query_heads) == (2, 8)
    assert asked == [8] * 2 * 4


def test_memory_of_a_step_is_there_from_the_start(monkeypatch):
    """Of all layers: no collective writes what a kernel of this rank may still read."""
    from mla_backend.attention.sparse import impl as module

    cluster = Cluster(monkeypatch, 2, 1)
    shared = [attached(rank.indexer.k_cache).shared for rank in cluster.ranks]
    slots, attend = [], module.mla_sparse_attention

    def note(q, cache, of_step, **options):
        slots.append(of_step.data_ptr())
        return attend(q, cache, of_step, **options)

    monkeypatch.setattr(module, "mla_sparse_attention", note)
    for requests in (Requests(*MIXED, 8), Requests([1], [70], 8)):
        cluster.step(requests)
    own = [rank.impl._slots.data_ptr() for rank in cluster.ranks]
    assert sorted(slots) == sorted(2 * own) and len(set(own)) == 2
    for choice, rank in zip(shared, cluster.ranks, strict=True):
        positions, scores = choice.candidates(3)
        assert positions.data_ptr() == choice._own.data_ptr() == scores.data_ptr() - 4 * 96
        assert rank.impl._slots.shape == (64, 96)


@pytest.mark.parametrize("by_nccl", [True, False])
def test_ranks_exchange_in_the_order_of_their_other_collectives(monkeypatch, by_nccl):
    """By vLLM's own communicator where there is one, and into the memory that is given."""
    from vllm.distributed import parallel_state

    from mla_backend.compat import all_gather_into

    calls = []
    nccl = types.SimpleNamespace(disabled=False, all_gather=lambda *args: calls.append(args))
    communicator = types.SimpleNamespace(pynccl_comm=nccl if by_nccl else None)
    group = types.SimpleNamespace(device_communicator=communicator, device_group="ranks")
    monkeypatch.setattr(parallel_state, "get_dcp_group", lambda: group)
    monkeypatch.setattr(
        torch.distributed,
        "all_gather_into_tensor",
        lambda *args, group: calls.append((*args, group)),
    )
    gathered, own = torch.zeros(6), torch.zeros(3)
    all_gather_into(gathered, own)
    nccl.disabled = True
    all_gather_into(gathered, own)
    assert all(call[0] is gathered and call[1] is own for call in calls)
    assert [call[2:] for call in calls] == [() if by_nccl else ("ranks",), ("ranks",)]


def test_layers_of_an_engine_share_their_memory(monkeypatch):
    from mla_backend.attention.sparse.kernel import shared_choice, slots_buffer

    cluster = Cluster(monkeypatch, 2, 1)
    config, device = fake_config(dcp=2), torch.device("cpu")
    choice, slots = shared_choice(config, 64, 96, device), slots_buffer(config, 64, 96, device)
    assert shared_choice(config, 64, 96, device) is choice
    assert slots_buffer(config, 64, 96, device) is slots
    assert attached(cluster.ranks[0].indexer.k_cache).shared is not choice
    assert shared_choice(fake_config(), 64, 96, device) is None
    assert slots_buffer(fake_config(), 64, 96, device) is None


def test_an_engine_gets_no_memory_of_one_that_is_gone():
    """Whose dict of layers lay where its own lies now, while something still keeps that memory."""
    from mla_backend.attention.sparse.kernel import slots_buffer

    config, draft, device = fake_config(dcp=2), fake_config(dcp=2), torch.device("cpu")
    layers = config.compilation_config.static_forward_context
    draft.compilation_config.static_forward_context = layers
    kept = slots_buffer(config, 64, 96, device)
    assert slots_buffer(draft, 64, 96, device) is kept
    del config
    assert slots_buffer(draft, 64, 96, device) is not kept


def test_more_ranks_than_the_kernel_merges_are_refused():
    from mla_backend.attention.sparse.kernel import shared_choice

    said = "decode_context_parallel_size 16 with index_topk 2048.* takes 8 of them. Mend: .*size 8$"
    with pytest.raises(ValueError, match=said):
        shared_choice(fake_config(dcp=16), 4, 2048, torch.device("cpu"))
