# SPDX-License-Identifier: Apache-2.0
"""Drafts under decode context parallelism: ranks that have every so many of a request's tokens,
merged, against attention over all of them; in steps as vLLM hands them to the builder of a rank.
"""

from types import SimpleNamespace

import pytest
import torch
from mla_kernels.decode.reference import mla_decode_reference
from mla_kernels.layouts import MlaDims
from mla_kernels.testing.cases import decode_case, random_tokens
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.spec_decode import llm_base_proposer

from mla_backend import compat
from mla_backend.attention import support
from mla_backend.attention.impl import MlaImpl
from mla_backend.attention.metadata import MlaMetadataBuilder
from mla_backend.attention.shard import Shard
from tests.backend.test_drafted_batches import DRAFT, make_builder

DRAFTS, HEADS = 3, 16
MTP = {"method": "mtp", "parallel_drafting": False}
SHARED = pytest.mark.parametrize("size, interleave", [(2, 1), (4, 1), (2, 2), (2, 64)])


@pytest.fixture
def builder(monkeypatch):
    """builder(shard): of a rank of an engine of `one_layer` with drafts."""
    name = "eagle_step_update_slot_mapping_and_metadata"
    monkeypatch.setattr(llm_base_proposer, name, getattr(llm_base_proposer, name))  # put back

    def make(shard, **how):
        how = {"threshold": 1 + DRAFTS, "drafts": DRAFTS, **MTP, **how}
        return make_builder(monkeypatch, 0, shard=shard, **how)

    return make


def make_step(lengths, new, table, padded=0, local=None):
    """Requests of `lengths` tokens with `new` new ones, and `padded` that pad a graph of whole
    requests of 1 + DRAFTS tokens. local: what the host took for the rank's lengths."""
    B = len(lengths) + padded
    starts = torch.tensor([0, *new, *[0] * padded]).cumsum(0).int()
    T = int(starts[-1]) + padded * (1 + DRAFTS)
    seq_lens = torch.tensor([*lengths, *[0] * padded], dtype=torch.int32)
    blocks = torch.full((B, 20), 2**30, dtype=torch.int32)
    blocks[: len(table), : table.shape[1]] = table
    return CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=seq_lens,
        # Before it was known which drafts were rejected.
        seq_lens_cpu_upper_bound=seq_lens + DRAFTS,
        max_seq_len=max(lengths) + DRAFTS,
        num_reqs=B,
        num_actual_tokens=T,
        max_query_len=max(new),
        block_table_tensor=blocks,
        slot_mapping=torch.zeros(T, dtype=torch.int64),
        causal=True,
        dcp_local_seq_lens=local,
    )


def visible(lengths, new):
    return [n - q + 1 + i for n, q in zip(lengths, new, strict=True) for i in range(q)]


def holds(shard, count):
    """Which of a request's first `count` tokens are the rank's."""
    return torch.arange(count) // shard.interleave % shard.size == shard.rank


TABLE = torch.arange(50, dtype=torch.int32).view(5, 10)
LENGTHS, NEW = [4, 65, 300, 131, 2], [4, 4, 2, 3, 1]


@SHARED
def test_each_token_sees_its_part_of_the_rank(builder, size, interleave):
    """Also where the host's lengths count drafts that were rejected."""
    for rank in range(size):
        shard = Shard(size, rank, interleave)
        stale = torch.full((5,), 77, dtype=torch.int32)
        decode = builder(shard).build(0, make_step(LENGTHS, NEW, TABLE, local=stale)).decode
        assert decode.rest is None and decode.tokens == sum(NEW) == len(decode.lengths)
        assert decode.plan.s_q == 1
        expected = [int(holds(shard, n).sum()) for n in visible(LENGTHS, NEW)]
        assert decode.lengths.tolist() == expected
        rows = torch.arange(5).repeat_interleave(torch.tensor(NEW))
        assert decode.block_table[:, :10].equal(TABLE[rows])
        # What vLLM masks by (0.32), of the requests.
        assert decode.seq_lens.tolist() == [int(holds(shard, n).sum()) for n in LENGTHS]
        assert decode.dcp_tot_seq_lens.tolist() == LENGTHS


def attend(made, decode, case, q):
    """By the layer, of a model that `made` builds steps for."""
    layer = object.__new__(MlaImpl)
    layer._on_cpu = layer._fp8_cache = layer.supports_quant_query_input = False
    layer.scale, layer.kv_lora_rank = case.options["scale"], case.options["kv_lora_rank"]
    layer.decode_kernel = made._plans._kernel
    step = SimpleNamespace(decode=decode)
    return layer.forward_mqa(q, case.kv_cache, step, SimpleNamespace(_k_scale=None))


def merged(parts):
    """As vLLM merges (out, lse) of ranks: by weights that sum to 1, or 0 where no rank has any."""
    lses = torch.stack([lse for _, lse in parts]).double()
    weights = (lses - lses.logsumexp(0)).exp().nan_to_num(0)
    outs = torch.stack([out for out, _ in parts]).double()
    return (outs * weights[..., None]).sum(0), lses.logsumexp(0)


@pytest.mark.parametrize("new, padded", [(NEW, 0), ([4, 4, 4], 1), ([1] * 5, 0)])
@SHARED
def test_ranks_merge_to_causal_attention_over_all(builder, size, interleave, new, padded):
    lengths, heads = LENGTHS[: len(new)], HEADS * size
    held = random_tokens(lengths, MlaDims())
    step = make_step(lengths, new, TABLE[: len(new)], padded)
    T, real = step.num_actual_tokens, sum(new)
    q = torch.randn(T, heads, 576, generator=torch.Generator().manual_seed(1))
    parts = []
    for rank in range(size):
        shard = Shard(size, rank, interleave)
        mine = [t[holds(shard, len(t))] for t in held]
        case = decode_case([len(t) for t in mine], tokens=mine, dtype=torch.float32)
        local = make_step(lengths, new, case.block_table, padded)
        made = builder(shard)
        out, lse = attend(made, made.build(0, local).decode, case, q)
        assert out[real:].eq(0).all() and lse[real:].eq(-torch.inf).all()
        parts.append((out[:real], lse[:real]))
    out, lse = merged(parts)
    start = 0
    for tokens, q_len in zip(held, new, strict=True):
        rows = slice(start, start + q_len)
        case = decode_case(
            [len(tokens)], tokens=[tokens], q=q[rows][None], dtype=torch.float32, s_q=q_len
        )
        want, want_lse = mla_decode_reference(*case.args, **case.options, causal=True)
        torch.testing.assert_close(out[rows], want[0].double(), rtol=0, atol=1e-5)
        torch.testing.assert_close(lse[rows], want_lse[0].double(), rtol=0, atol=1e-5)
        start = rows.stop


def test_vllm_masks_the_requests_of_which_a_rank_has_nothing(builder):
    """By `seq_lens` and where requests begin, so of all rows of one: seen in 0.32."""
    dcp = pytest.importorskip("vllm.v1.attention.ops.dcp")
    if not hasattr(dcp, "mask_dcp_empty_shards_"):
        pytest.skip("this vLLM masks nothing")
    step = make_step([2, 5, 300], [2, 4, 4], TABLE[:3])
    decode = builder(Shard(4, 3)).build(0, step).decode
    assert decode.lengths.tolist() == [0, 0, 0, 0, 1, 1, 74, 74, 74, 75]
    lse = torch.zeros(10, 1)
    dcp.mask_dcp_empty_shards_(lse, decode.seq_lens, step.query_start_loc)
    assert lse[:, 0].isinf().tolist() == [True] * 2 + [False] * 8


def addresses(decode):
    tensors = decode.block_table, decode.lengths, decode.seq_lens
    return *(x.data_ptr() for x in tensors), *decode.block_table.stride(), id(decode.plan)


def test_a_graph_finds_its_step_where_it_was_captured(builder):
    """Four requests of four tokens: captured full, replayed with one that pads, then with three."""
    made = builder(Shard(2, 1))
    captured = made.build(0, make_step([4] * 4, [4] * 4, TABLE[:4])).decode
    for real in (3, 1):
        lengths = [70, 5, 129][:real]
        replayed = made.build(0, make_step(lengths, [4] * real, TABLE[:real], 4 - real)).decode
        assert addresses(replayed) == addresses(captured)
        seen = [n // 2 for n in visible(lengths, [4] * real)]
        assert captured.lengths.tolist() == seen + [0] * 4 * (4 - real)
        assert captured.seq_lens.tolist() == [n // 2 for n in lengths] + [0] * (4 - real)


@pytest.mark.parametrize("local", [None, torch.full((3,), 9, dtype=torch.int32)])
def test_a_drafters_own_steps(builder, local):
    """Of one token: vLLM's table as it is, and the rank's part of lengths that have grown since
    the model's step, whose part of the rank vLLM hands on or leaves out."""
    made = builder(Shard(2, 0))
    common = make_step([7, 64, 129], [1, 1, 1], TABLE[:3], local=local)
    decode = made.build(0, common).decode
    assert decode.lengths.tolist() == decode.seq_lens.tolist() == [4, 32, 65]
    assert decode.block_table.data_ptr() == common.block_table_tensor.data_ptr()
    common.seq_lens += 1
    again = made.build(0, common).decode
    assert again.lengths.tolist() == [4, 33, 65] and addresses(again) == addresses(decode)
    assert common.dcp_local_seq_lens is local


def test_prompts_beside_drafts_are_prompts(builder):
    """Their contexts are exact on the host; a short one's tokens are rows among the drafts'."""
    made = builder(Shard(2, 1))
    step = make_step([300, 3, 400], [4, 3, 400], TABLE[:3])
    step.seq_lens_cpu_upper_bound = step.seq_lens
    metadata = made.build(0, step)
    assert (metadata.num_decodes, metadata.num_prefills) == (2, 1)
    assert metadata.decode.lengths.tolist() == [148, 149, 149, 150, 0, 1, 1]


def test_plans_are_of_rows_of_one_token(builder):
    made = builder(Shard(2, 1))
    assert list(made._plans._largest) == [1]
    assert made._plans.most_requests(1) == 6 * (1 + DRAFTS)  # of max_num_seqs 6
    assert made._plans.for_step(torch.zeros(2, dtype=torch.int32), 1).num_heads == 2 * HEADS


def test_without_drafts_lengths_are_vllms(builder):
    made = builder(Shard(2, 1), drafts=0, threshold=1)
    local = torch.tensor([150, 3], dtype=torch.int32)
    decode = made.build(0, make_step([300, 6], [1, 1], TABLE[:2], local=local)).decode
    assert decode.lengths.data_ptr() == decode.seq_lens.data_ptr() == local.data_ptr()


def test_lengths_where_vllm_may_forget_them(builder, monkeypatch):
    """In one place for all steps, as graphs must find them there."""
    monkeypatch.setattr(compat, "forgets_lengths_of_ranks", lambda _: True)
    made = builder(Shard(2, 1), drafts=0, threshold=1)
    local = torch.tensor([150, 3], dtype=torch.int32)
    places = set()
    for given in (local, None):
        decode = made.build(0, make_step([300, 6], [1, 1], TABLE[:2], local=given)).decode
        assert decode.lengths.tolist() == [150, 3] and decode.lengths is decode.seq_lens
        places.add(decode.lengths.data_ptr())
    assert len(places) == 1


def test_microbatches_are_refused(builder, monkeypatch):
    monkeypatch.setattr(support, "refuse_microbatches", lambda *_: None)
    with pytest.raises(ValueError, match=r"2 microbatches .* context parallelism\. Mend: leave"):
        builder(Shard(2, 1), drafts=0, threshold=1, microbatches=2)
    builder(Shard(), drafts=0, threshold=1, microbatches=2)


def test_the_check_of_a_rank_knows_its_tokens(builder, monkeypatch):
    monkeypatch.setenv("MLA_BACKEND_CHECK", "1")
    spec = SimpleNamespace(block_size=64)
    monkeypatch.setattr(MlaMetadataBuilder, "kv_cache_spec", spec, raising=False)
    for shard in (Shard(), Shard(2, 1), Shard(4, 2, 64)):
        assert builder(shard)._step_check._shard == shard


def test_a_builder_corrects_the_slots_of_drafts_where_ranks_share_them(builder, monkeypatch):
    dealt = []
    monkeypatch.setattr(compat, "deal_draft_slots", lambda slots: dealt.append(slots.__self__))
    builder(Shard())
    builder(Shard(2, 1), drafts=0, threshold=1)
    assert dealt == []
    builder(Shard(2, 1, 2))
    assert dealt == [Shard(2, 1, 2)]


@pytest.mark.parametrize(
    "how, said",
    [
        (DRAFT, r"a draft model of its own \(speculative method draft_model\) with decode context"),
        ({"parallel_drafting": True}, r"parallel drafting \(speculative method mtp\) with decode "),
        ({"method": "dspark", "parallel_drafting": True}, r"\(speculative method dspark\) with "),
    ],
)
def test_drafters_with_longer_steps_are_refused(builder, how, said):
    builder(Shard(), **how)
    with pytest.raises(ValueError, match=rf"cannot serve .*{said}.*Mend: --decode-context-par"):
        builder(Shard(2), **how)


def test_runs_that_vllm_deals_otherwise_are_refused(builder, monkeypatch):
    builder(Shard(2, 1, 128), drafts=0, threshold=1)
    monkeypatch.setattr(compat, "deals_within_64", lambda _: True)
    builder(Shard(2, 1, 64), drafts=0, threshold=1)
    with pytest.raises(ValueError, match=r"--cp-kv-cache-interleave-size 128: .* divides 64, or "):
        builder(Shard(2, 1, 128), drafts=0, threshold=1)


@pytest.mark.parametrize("drafts", [0, 3])
def test_absorbed_ends_of_prompts_are_refused_where_ranks_share_the_cache(
    builder, monkeypatch, drafts
):
    """None would be: only 0 and auto say so."""
    how = {"drafts": drafts, "threshold": 1 + drafts, **MTP}
    make_builder(monkeypatch, 40, **how)
    make_builder(monkeypatch, "auto", shard=Shard(2), **how)
    said = r"EXTEND_TOKENS=40 with decode context parallelism of 2 ranks, .*Mend: unset MLA_BACK"
    with pytest.raises(ValueError, match=said):
        make_builder(monkeypatch, 40, shard=Shard(2), **how)


@pytest.mark.parametrize("method", ["mtp", "eagle", "ngram"])
def test_drafters_whose_steps_are_the_models_are_served(method):
    support.refuse_drafter(method, False)
