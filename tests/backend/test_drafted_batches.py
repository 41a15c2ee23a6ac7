# SPDX-License-Identifier: Apache-2.0
"""Steps of requests that are drafted for, in the order that vLLM's first model runner gives them.

Under asynchronous scheduling the host's lengths count drafts that were rejected, and vLLM takes the
contexts of what is split off as a prompt from the host: so no drafted request may be.
"""

import functools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm.model_executor.layers.attention import mla_attention
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.utils import reorder_batch_to_split_decodes_and_prefills
from vllm.v1.spec_decode.utils import extend_all_queries_by_N
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from mla_backend import compat
from mla_backend.attention.shard import Shard
from tests.backend.test_gpu_support import build, drafting, one_layer

DRAFTS = 2
ALONE = Shard()
# Of a draft model of its own.
DRAFT = {
    "layer": "draft_model.model.layers.0.self_attn.attn",
    "method": "draft_model",
    "parallel_drafting": False,
}


class Batch:
    """What vLLM's reordering reads of its InputBatch: rows are (name, computed, of the prompt, new,
    rejected)."""

    def __init__(self, *rows):
        self.rows = list(rows)

    req_ids = property(lambda self: [row[0] for row in self.rows])
    num_computed_tokens_cpu = property(lambda self: np.array([row[1] for row in self.rows]))
    num_prompt_tokens = property(lambda self: np.array([row[2] for row in self.rows]))

    def swap_states(self, a, b):
        self.rows[a], self.rows[b] = self.rows[b], self.rows[a]

    def step(self):
        """vLLM's metadata of the step, on the host as under asynchronous scheduling."""
        computed, new, rejected = (
            torch.tensor([row[i] for row in self.rows], dtype=torch.int32) for i in (1, 3, 4)
        )
        starts = torch.cat([torch.zeros(1), new.cumsum(0)]).int()
        upper, T = computed + new, int(new.sum())
        return CommonAttentionMetadata(
            query_start_loc=starts,
            query_start_loc_cpu=starts,
            seq_lens=upper - rejected,
            seq_lens_cpu_upper_bound=upper,
            max_seq_len=int(upper.max()),
            num_reqs=len(new),
            num_actual_tokens=T,
            max_query_len=int(new.max()),
            block_table_tensor=torch.arange(len(new) * 40, dtype=torch.int32).view(len(new), 40),
            slot_mapping=torch.zeros(T, dtype=torch.int64),
            causal=True,
        )


@pytest.fixture
def builder(monkeypatch):
    """builder(extend_tokens): as on a GPU, where a prompt's context is what vLLM says."""
    return functools.partial(make_builder, monkeypatch)


def make_builder(
    monkeypatch,
    extend_tokens,
    threshold=1 + DRAFTS,
    layer="layer",
    shard=ALONE,
    drafts=DRAFTS,
    microbatches=1,
    **how,
):
    """shard: what the builder's rank has of the cache."""
    config = drafting(one_layer(monkeypatch), drafts)
    vars(config.speculative_config).update(how)
    layers = config.compilation_config.static_forward_context
    layers[layer] = layers["layer"]
    layers[layer].impl.dcp_rank = shard.rank
    config.parallel_config.decode_context_parallel_size = shard.size
    config.parallel_config.num_ubatches = microbatches
    config.scheduler_config.max_num_seqs = 6
    config.parallel_config.cp_kv_cache_interleave_size = shard.interleave
    config.model_config.max_model_len = 40 * 64
    config.model_config.hf_text_config = SimpleNamespace(num_hidden_layers=4)
    monkeypatch.setenv("MLA_BACKEND_EXTEND_TOKENS", str(extend_tokens))
    made = build(monkeypatch, config, threshold, ranks=shard.size, layer=layer)
    made._on_cpu = made.use_pcp = made.non_causal_multi_token_decode = False
    made.chunked_prefill_workspace_size, made.page_size = 8192, 64
    made.chunked_prefill_workspace = torch.empty(1)
    made.dcp_local_block_size = made.cp_kv_cache_interleave_size = shard.interleave
    made.dcp_virtual_block_size = shard.interleave * shard.size
    made.dcp_manager = None
    made.model_config = SimpleNamespace(dtype=torch.bfloat16, get_head_size=lambda: 576)
    made.q_data_type, made.metadata_cls = torch.bfloat16, SimpleNamespace
    if compat.versions.before((0, 28)):  # which take pinned memory for it, and keep no such list
        describe = "build_mla_chunked_context_metadata"
        monkeypatch.setattr(mla_attention, describe, lengths_of_contexts)
    made._prefill_backend = SimpleNamespace(
        prepare_metadata=lambda *_: None,
        get_name=lambda: "FLASH_ATTN",  # 0.33 asks
    )
    return made


def lengths_of_contexts(*, context_lens_cpu, **_):
    return SimpleNamespace(context_lens_list=context_lens_cpu.tolist())


def launches(decode):
    while decode is not None:
        yield decode
        decode = decode.rest


@pytest.mark.parametrize("new, absorbed", [(33, False), (32, True)])
def test_a_resumed_request_is_no_reason_to_take_drafts_for_prompts(builder, new, absorbed):
    """Preempted in the middle of its answer, with 128 tokens still cached, it is in a slot in front
    of the drafts. Four cached tokens to a new one: it is absorbed; with less it is a prompt."""
    made = builder(128)
    batch = Batch(
        ("resumed", 128, 40, new, 0),
        ("first", 1003, 900, 1 + DRAFTS, 2),
        ("second", 2003, 1900, 1 + DRAFTS, 1),
    )
    scheduled = SimpleNamespace(num_scheduled_tokens={row[0]: row[3] for row in batch.rows})
    reorder_batch_to_split_decodes_and_prefills(batch, scheduled, made.reorder_batch_threshold)
    assert batch.req_ids[2] == "resumed"
    metadata = made.build(0, batch.step())
    drafts, *rest = launches(metadata.decode)
    assert sorted(drafts.seq_lens.tolist()) == [1004, 2005]  # without those that were rejected
    if absorbed:
        assert metadata.num_prefills == 0
        assert torch.cat([launch.seq_lens for launch in rest]).max() == 160
    else:
        assert (metadata.num_decodes, metadata.num_prefills, rest) == (2, 1, [])
        assert metadata.prefill.chunked_context.context_lens_list == [128]


@pytest.mark.parametrize("extend_tokens", [0, 128])
def test_unequal_drafts_see_what_was_accepted(builder, extend_tokens):
    """The last of them was cut by vLLM's budget of tokens."""
    made = builder(extend_tokens)
    batch = Batch(("a", 1003, 900, 3, 2), ("b", 2003, 1900, 3, 1), ("c", 2303, 2000, 2, 2))
    metadata = made.build(0, batch.step())
    assert (metadata.num_decodes, metadata.num_prefills) == (3, 0)
    together, alone = launches(metadata.decode)
    assert together.seq_lens.tolist() == [1004, 2005] and together.tokens == 6
    assert alone.seq_lens.tolist() == [2303] and alone.tokens == 2
    assert alone.block_table[0].tolist() == list(range(80, 120))


@pytest.mark.parametrize("new", [(60, 40), (1 + DRAFTS, 1 + DRAFTS)])
def test_a_draft_model_runs_over_a_token_more_of_each_request(builder, new):
    """Which vLLM does not add to the host's lengths: the prompt that begins has no context. That
    token may be the one that makes prompts of requests."""
    made = builder(0)
    batch = Batch(("goes on", 640, 900, new[0], 0), ("begins", 0, 700, new[1], 0))
    metadata = made.build(0, longer(batch))
    assert (metadata.num_decodes, metadata.num_prefills) == (0, 2)
    assert metadata.prefill.chunked_context.context_lens_list[1] == 0


def longer(batch, tokens=1):
    """The step as a draft model of its own begins it, with a token more of each request; with
    parallel drafting more `tokens`."""
    common = batch.step()
    slots = torch.zeros(common.num_actual_tokens + tokens * common.num_reqs, dtype=torch.int64)
    starts = torch.arange(common.num_reqs + 1, dtype=torch.int32)
    return extend_all_queries_by_N(common, tokens, starts, slots)


@pytest.mark.parametrize("extend_tokens", [0, 128])
def test_what_a_draft_model_drafts_for_is_no_prompt_to_it(builder, extend_tokens):
    """It sees what was accepted, and all that is cached of a prompt."""
    made = builder(extend_tokens, **DRAFT)
    batch = Batch(("a", 1003, 900, 3, 2), ("b", 2003, 1900, 3, 1), ("prompt", 640, 900, 200, 0))
    metadata = made.build(0, longer(batch))
    assert (metadata.num_decodes, metadata.num_prefills) == (2, 1)
    (together,) = launches(metadata.decode)
    assert together.seq_lens.tolist() == [1005, 2006] and together.tokens == 8
    assert metadata.prefill.chunked_context.context_lens_list == [640]
    assert made.reorder_batch_threshold == 1 + DRAFTS


def test_where_no_kernel_takes_a_token_more(builder):
    """Of 7 drafts, whose requests of 8 tokens are decodes to the model alone."""
    made = builder(0, threshold=8, **DRAFT)
    metadata = made.build(0, longer(Batch(("a", 1003, 900, 8, 0), ("b", 2003, 1900, 8, 0))))
    assert (metadata.num_decodes, metadata.num_prefills) == (0, 2)
    assert metadata.prefill.chunked_context.context_lens_list == [1003, 2003]


def test_parallel_drafting_adds_as_many_tokens_as_drafts(builder):
    """vLLM's threshold has them, the host's lengths do not."""
    made = builder(0, **DRAFT | {"threshold": 1 + 2 * DRAFTS, "parallel_drafting": True})
    batch = Batch(("a", 1003, 900, 3, 2), ("b", 2003, 1900, 3, 1), ("prompt", 640, 900, 200, 0))
    metadata = made.build(0, longer(batch, DRAFTS))
    assert (metadata.num_decodes, metadata.num_prefills) == (2, 1)
    assert metadata.decode.seq_lens.tolist() == [1006, 2007]
    assert metadata.prefill.chunked_context.context_lens_list == [640]
    metadata = made.build(0, longer(Batch(("prompt", 640, 900, 4, 0)), DRAFTS))
    assert metadata.prefill.chunked_context.context_lens_list == [640]


# Of a draft with MLA that gets the model's hidden states and makes its drafts at once (P-EAGLE).
AT_ONCE = {
    "layer": "model.layers.4.self_attn.attn",
    "method": "eagle3",
    "parallel_drafting": True,
    "threshold": 1 + 2 * DRAFTS,
}


def test_an_eagle_draft_in_parallel_adds_all_drafts_but_one(builder):
    """Its first token is in the place of one of the model's."""
    made = builder(0, **AT_ONCE)
    batch = Batch(("a", 1003, 900, 3, 2), ("b", 2003, 1900, 3, 1), ("prompt", 640, 900, 200, 0))
    metadata = made.build(0, longer(batch, DRAFTS - 1))
    assert (metadata.num_decodes, metadata.num_prefills) == (2, 1)
    assert metadata.decode.seq_lens.tolist() == [1005, 2006]
    assert metadata.prefill.chunked_context.context_lens_list == [640]


@pytest.mark.parametrize(
    "drafter",
    [
        DRAFT | {"layer": "layer"},
        DRAFT | {"method": "mtp"},
        AT_ONCE | {"layer": "model.layers.3.self_attn.attn"},
        AT_ONCE | {"layer": "model.layers.3.self_attn.5.attn"},  # LongCat has two a layer
        AT_ONCE | {"layer": "model.layers.3.self_attn.0.attn", "parallel_drafting": False},
        AT_ONCE | {"parallel_drafting": False},
        AT_ONCE | {"method": "dflash"},
    ],
)
def test_other_drafters_have_no_token_more(builder, drafter):
    made = builder(0, **drafter | {"threshold": 1 + DRAFTS})
    metadata = made.build(0, Batch(("a", 1003, 900, 3, 2), ("prompt", 640, 900, 4, 0)).step())
    assert (metadata.num_decodes, metadata.num_prefills) == (1, 1)
    assert metadata.prefill.chunked_context.context_lens_list == [640]


def test_what_is_cached_is_asked_of_prompts_alone(builder, monkeypatch):
    """vLLM 0.26 and 0.27 take the leading prompts for those with a context (compat)."""
    asked = []
    monkeypatch.setattr(compat, "merge_every_context", lambda _, cached: asked.append(cached()))
    batch = Batch(
        ("answers", 1003, 900, 3, 1), ("begins", 0, 700, 40, 0), ("late", 640, 900, 60, 0)
    )
    builder(0).build(0, batch.step())
    assert [cached.tolist() for cached in asked] == [[0, 640]]


def test_prompts_on_a_cpu_are_read_behind_the_answers_of_the_step(builder):
    made = builder(0)
    made._on_cpu, made.kv_cache_spec = True, SimpleNamespace(block_size=64)
    batch = Batch(("answers", 1003, 900, 3, 1), ("prompt", 70, 900, 10, 0))
    metadata = made.build(0, batch.step())
    assert (metadata.num_decodes, metadata.num_prefills) == (1, 1)
    (tile,) = metadata.prefill_tiles
    assert tile.slots.tolist() == [*range(40 * 64, 40 * 64 + 80)]
    assert [piece.causal for piece in tile.pieces] == [False, True]


@pytest.mark.skipif(compat.versions.before((0, 28)), reason="this vLLM does not look for it")
def test_vllm_still_sees_who_reads_what_is_being_written(builder):
    """It makes no microbatches (--enable-dbo) of a prompt and of one that shares its blocks: the
    second, 60 tokens behind 640 cached ones, would read what the first has not written."""
    shared = np.array([[*range(1, 11), 50], range(1, 12)], dtype=np.int32)
    tables = [SimpleNamespace(block_size=64, get_numpy_array=lambda: shared)]
    runner = SimpleNamespace(
        parallel_config=SimpleNamespace(use_ubatching=True),
        input_batch=SimpleNamespace(
            num_computed_tokens_cpu=np.array([640, 0]),
            block_table=SimpleNamespace(block_tables=tables),
        ),
        reorder_batch_threshold=builder(128).reorder_batch_threshold,
    )
    assert not GPUModelRunner._allow_microbatching(runner, 2, np.array([60, 700]))
    runner.reorder_batch_threshold = 128
    assert GPUModelRunner._allow_microbatching(runner, 2, np.array([60, 700]))


@pytest.mark.parametrize(
    "new, padded", [([4, 4, 4], 16), ([2, 2, 2], 8), ([1, 1, 1, 1, 1], 8), ([3], 4), ([3, 4], 16)]
)
def test_tokens_behind_the_last_request_are_nobodys(builder, new, padded):
    """As vLLM 0.28 and 0.29 pad steps of several MTP modules: without a request for them."""
    made = builder(0)
    common = Batch(*((str(i), 70, 40, n, 0) for i, n in enumerate(new))).step()
    alone = list(launches(made.build(0, common).decode))
    found = list(launches(made.build(0, common.replace(num_actual_tokens=padded)).decode))
    assert [one.tokens for one in found] == [one.tokens for one in alone]
    for one, other in zip(found, alone, strict=True):
        assert one.lengths.equal(other.lengths) and one.plan.s_q == other.plan.s_q


@pytest.mark.parametrize(
    "new, padding, attended",
    [
        ([1, 1, 0], 0, [0, 1]),
        ([0, 1, 1], 0, [1, 2]),
        ([0, 1], 0, [1]),
        ([0, 0], 0, [0]),  # by nobody
        ([0, 0, 0], 2, [0, 1]),  # likewise, where a graph has been captured for two tokens
    ],
)
def test_requests_without_a_token(builder, new, padding, attended):
    """Microbatches of the second runner of vLLM 0.30 and later, which it cuts where other ranks'
    tokens end."""
    made = builder(0, drafts=0, threshold=1)
    common = Batch(*((str(i), 70 + i, 40, n, 0) for i, n in enumerate(new))).step()
    common = common.replace(num_actual_tokens=common.num_actual_tokens + padding)
    decode = made.build(0, common).decode
    assert decode.rest is None and decode.plan.s_q == 1
    assert decode.lengths.equal(common.seq_lens[attended])
    assert decode.block_table.equal(common.block_table_tensor[attended])


@pytest.mark.parametrize(
    "new, tokens, drafts",
    [
        ([6], 6, 0),  # the end of a prompt
        ([2, 2], 6, 2),  # drafts of which some were cut off
        ([3, 3, 2], 12, 2),  # as many tokens as four whole requests have
        ([1, 1, 1], 8, 0),
        ([5, 700], 706, 0),  # with a prompt that attends in expanded form
    ],
)
def test_requests_that_pad_a_step_are_nobodys(builder, monkeypatch, new, tokens, drafts):
    """As the second runner of vLLM 0.26 pads every step with VLLM_USE_BREAKABLE_CUDAGRAPH=1."""
    from mla_backend.compat import step_metadata

    monkeypatch.setattr(step_metadata, "_pads_requests", lambda: True)
    made = builder(128, drafts=drafts, threshold=1 + drafts)
    rows = [(str(i), 640, 40, n, 0) for i, n in enumerate(new)]
    alone = made.build(0, Batch(*rows).step())
    requests = 4 if tokens == 12 else min(tokens, 6)  # vLLM's: as many as tokens, or as may be
    wide = Batch(*rows, *[("none", 0, 0, 0, 0)] * (requests - len(new))).step()
    found = made.build(0, wide.replace(num_actual_tokens=tokens))
    assert found.num_actual_tokens == sum(new) and found.num_reqs == len(new)
    for one, other in zip(launches(found.decode), launches(alone.decode), strict=True):
        assert one.lengths.equal(other.lengths) and one.plan.s_q == other.plan.s_q
        assert one.block_table.equal(other.block_table) and one.tokens == other.tokens
    assert (found.prefill is None) == (alone.prefill is None)
    if found.prefill is not None:
        context = found.prefill.chunked_context
        assert context.context_lens_list == alone.prefill.chunked_context.context_lens_list


def test_a_padded_graph_of_whole_steps_keeps_its_requests(builder, monkeypatch):
    """Its kernels were captured for as many."""
    from mla_backend.compat import step_metadata

    monkeypatch.setattr(step_metadata, "_pads_requests", lambda: True)
    made = builder(0)
    rows = [(str(i), 70, 40, 1 + DRAFTS, 0) for i in range(3)]
    common = Batch(*rows, ("none", 0, 0, 0, 0)).step().replace(num_actual_tokens=4 * (1 + DRAFTS))
    decode = made.build(0, common).decode
    assert decode.rest is None and len(decode.lengths) == 4 and decode.plan.s_q == 1 + DRAFTS


def test_a_padded_step_without_a_token_is_left_alone(monkeypatch):
    from mla_backend.compat import step_metadata

    monkeypatch.setattr(step_metadata, "_pads_requests", lambda: True)
    common = Batch(("none", 0, 0, 0, 0), ("none", 0, 0, 0, 0)).step()
    common = common.replace(num_actual_tokens=4)
    assert compat.without_padding(common) is common


@pytest.mark.parametrize("version, pads", [("0.26.0", True), ("0.27.1", False)])
@pytest.mark.parametrize("breakable", [True, False])
def test_which_vllm_pads_requests(monkeypatch, version, pads, breakable):
    from vllm.compilation import breakable_cudagraph

    from mla_backend.compat import step_metadata, versions

    monkeypatch.setattr(versions, "installed_vllm_version", lambda: version)
    monkeypatch.setattr(breakable_cudagraph, "is_breakable_cudagraph_enabled", lambda: breakable)
    assert step_metadata._pads_requests() == (pads and breakable)
