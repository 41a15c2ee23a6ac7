# SPDX-License-Identifier: Apache-2.0
"""Prompts of sparse layers that see no more than `index_topk` tokens: in expanded form."""

import random
import types

import numpy as np
import pytest
import torch
from follow import following
from mla_serving.demo_model import make_demo_model
from sparse_parts import NOPE, RANK, ROPE, H, make_impl

from mla_backend import compat
from tests.backend.conftest import tokens

LAYERS, TOPK = 2, 256


def requests(rng, *lengths, new_tokens=6, prefix=()):
    prompts = [[*prefix, *tokens(rng, n)] for n in lengths]
    return [{"prompt": prompt, "max_tokens": new_tokens} for prompt in prompts]


@pytest.fixture(scope="module")
def engine(run_engine, tmp_path_factory):
    """(checkpoint, result): a draft layer (MTP) proposes 2 tokens, a step has at most 512."""
    rng = random.Random(3)
    below, at, above = requests(rng, TOPK - 1, TOPK, TOPK + 1, new_tokens=12)
    shared = tokens(rng, 192)
    scenarios = {
        "below": [below],
        "at": [at],
        "above": [above],
        "chunks": requests(rng, 250, 250, 250, 700),
        "mixed": [
            {**request, "arrive": step}
            for request, step in zip(
                # The first is read beyond `index_topk` while the others come.
                [*requests(rng, 240, new_tokens=40), *requests(rng, 90, 257, 40, 60, 2)],
                (0, 4, 8, 8, 12, 14),
                strict=True,
            )
        ],
        "first": [{"prompt": shared, "max_tokens": 4}],
        "prefix": requests(rng, 100, prefix=shared[:150]),
        "short end": requests(rng, 20, prefix=shared),
    }
    checkpoint = make_demo_model(
        "v3.2",
        tmp_path_factory.mktemp("v32-short") / "model",
        overrides={
            "index_topk": TOPK,
            "num_hidden_layers": LAYERS,
            "num_nextn_predict_layers": 1,
        },
    )
    return checkpoint, run_engine(
        scenarios,
        model=checkpoint,
        env={"MLA_BACKEND_CHECK": "1"},
        speculative_config={"method": "mtp", "num_speculative_tokens": 2},
        choices=True,
        max_num_batched_tokens=512,
    )


@pytest.mark.engine
@pytest.mark.parametrize(
    "scenario, expanded",
    [
        ("below", TOPK - 1),
        ("at", TOPK),
        ("above", 0),
        # 250 + 250 + 12, then 238 behind 12 with 274 of 700, which is the longer one.
        ("chunks", 512),
        # Beside decode tokens, but not the 40 that come with 257; 2 could be those of a draft.
        ("mixed", 240 + 90 + 60),
        ("first", 192),
        ("prefix", None),  # all that is not cached, behind a block or two
        ("short end", 0),
    ],
)
def test_tokens_and_who_attended(engine, oracle, scenario, expanded):
    checkpoint, result = engine
    ran = result["scenarios"][scenario]
    done = {k: n - ran["before"][k] for k, n in ran["after"].items() if isinstance(n, int)}
    if expanded is None:
        (output,) = ran["outputs"]
        assert output["cached"] in (64, 128)
        expanded = len(output["prompt"]) - output["cached"]
    assert done["forward_mha_tokens"] == (LAYERS + 1) * expanded
    # Of such prompts nothing is chosen but in the draft layer.
    assert done["indexer_tokens"] == done["forward_mqa_tokens"] + expanded
    gaps = []
    choices = torch.load(result["choices"])[scenario]
    for output, chosen in zip(ran["outputs"], choices, strict=True):
        with following(chosen) as follow:
            agreed, differences = oracle(checkpoint, [output])
        assert agreed == len(differences) == len(output["tokens"])
        assert differences.max() < 1e-4
        gaps += follow.gaps
    # Keys of short prompts are chosen among later.
    assert (len(gaps) > 10) is (scenario in ("below", "at", "above", "chunks", "mixed"))
    assert max(gaps, default=0) < 0.05


def common_metadata(new, cached, most_blocks=6):
    starts = torch.tensor([0, *new]).cumsum(0).int()
    lengths = torch.tensor(new).int() + torch.tensor(cached).int()
    return types.SimpleNamespace(
        num_reqs=len(new),
        num_actual_tokens=int(starts[-1]),
        max_query_len=max(new),
        query_start_loc=starts,
        query_start_loc_cpu=starts.clone(),
        seq_lens=lengths,
        seq_lens_cpu_upper_bound=lengths.clone(),
        block_table_tensor=torch.arange(len(new) * most_blocks).view(-1, most_blocks).int(),
    )


def short_prompts(most_s_q=1, backend=None):
    from mla_backend.attention.sparse.short_prompts import ShortPrompts

    return ShortPrompts(sparse_layer(backend), most_s_q, 64, torch.device("cpu"))


def sparse_layer(backend=None, **impl):
    buffer = torch.zeros(1, TOPK)
    impl = types.SimpleNamespace(topk_indices_buffer=buffer, dtype=torch.float32, **impl)
    backend = backend or types.SimpleNamespace(clone=dict)
    return types.SimpleNamespace(impl=impl, prefill_backend=backend)


@pytest.mark.parametrize(
    "new, cached, most_s_q, first",
    [
        ([256], [0], 1, 0),
        ([257], [0], 1, None),
        ([1, 1, 200], [900, 3, 0], 1, 2),
        ([1, 1], [900, 3], 1, None),
        ([3, 3, 4], [900, 3, 0], 3, 2),
        ([3, 1, 2], [900, 3, 0], 3, None),  # all of them may be drafts
        ([1, 200, 200], [900, 0, 57], 1, None),  # one sees 257
        ([1, 200, 200], [900, 0, 56], 1, 1),
        ([1, 8, 200], [900, 100, 0], 1, 1),  # what the long one saves pays for the other
        ([1, 8, 8], [900, 100, 0], 1, None),
        ([200] * 128, [56] * 128, 1, 0),
        ([200] * 129, [56] * 129, 1, None),  # more contexts than blocks are expanded at a time
        ([1, 200, 1], [900, 0, 0], 1, 1),  # vLLM's first runner: a prompt of one token at the end
    ],
)
def test_which_requests_of_a_step(new, cached, most_s_q, first):
    short = short_prompts(most_s_q)
    common = common_metadata(new, cached)
    assert short.find(common) == first
    if first is None:
        return
    prefill, tiles = short.describe(common, first)
    assert getattr(prefill, "use_dense_mha", True) and prefill.max_query_len == max(new[first:])
    assert prefill.query_start_loc.tolist() == np.cumsum([0, *new[first:]]).tolist()
    assert prefill.query_start_loc[-1] == sum(new) - common.query_start_loc[first]
    read = sum(len(tile.slots) for tile in tiles)
    assert read == sum(new[first:]) + sum(cached[first:])
    assert tiles[0].slots[0] == common.block_table_tensor[first, 0] * 64


@pytest.mark.parametrize("cached, expected", [(1280, True), (1281, False)])
def test_expanding_pays_from_170_tokens_that_see_a_row(cached, expected):
    """160 tokens read the cached rows and, on the average, 80 of their own."""
    from mla_backend.attention.sparse.short_prompts import pays

    assert pays(np.array([160]), np.array([cached])) is expected


@pytest.mark.skipif(compat.versions.before((0, 29)), reason="it computes on no CPU before 0.29")
@pytest.mark.parametrize("kept", [torch.float32, torch.int8, torch.int32, torch.uint8, None])
def test_a_gpu_gets_what_the_common_path_of_vllm_reads(monkeypatch, kept):
    """On a CPU in fp32, where that path computes too, in contexts of two parts. Latents come to
    kv_b_proj as they are, whatever its weight is kept in."""
    from vllm.v1.attention.backends.mla.prefill import registry

    from mla_backend.attention.sparse import short_prompts as module

    nope, rank, rope, heads = NOPE, RANK, ROPE, H
    g = torch.Generator().manual_seed(0)
    weight = torch.randn(rank, heads * 2 * nope, generator=g) * rank**-0.5

    class Projection(torch.nn.Module):
        quant_method, params_dtype = None, torch.float32

        def forward(self, x):
            # Some operators of packed and int8 weights read rows one behind the other.
            assert x.is_contiguous() or kept in (torch.float32, torch.uint8)
            return x @ weight, None

    if kept is not None:
        Projection.weight = torch.zeros(0, dtype=kept)
    impl = make_impl(monkeypatch, kv_b_proj=Projection())
    dims = {"qk_nope_head_dim": nope, "qk_rope_head_dim": rope, "v_head_dim": nope}
    backend = registry.MLAPrefillBackendEnum.CPU.get_class()(
        num_heads=heads, scale=impl.scale, kv_lora_rank=rank, vllm_config=None, **dims
    )
    new, cached = [1, 80, 40, 100], [300, 60, 0, 150]
    common = common_metadata(new, cached)
    cache = torch.full((24, 64, rank + rope), torch.nan)
    rows = [torch.randn(n, rank + rope, generator=g) for n in common.seq_lens.tolist()]
    for table, kv in zip(common.block_table_tensor, rows, strict=True):
        position = torch.arange(len(kv))
        cache[table[position // 64].long(), position % 64] = kv
    T = sum(new[1:])
    q = torch.randn(T, heads, nope + rope, generator=g)
    fresh = torch.cat([kv[-n:] for n, kv in zip(new[1:], rows[1:], strict=True)])
    outputs = []
    monkeypatch.setattr(module, "WORKSPACE_ROWS", 128)
    for on_cpu in (True, False):
        short = short_prompts(backend=backend)
        if not on_cpu:
            short._workspace = torch.empty(128, rank + rope)
        prefill, tiles = short.describe(common, 1)
        step = types.SimpleNamespace(prefill=prefill, prefill_tiles=tiles)
        impl._on_cpu = on_cpu
        output = torch.full((T, heads * nope), torch.nan)
        latent, rotated = fresh.split([rank, rope], -1)
        impl.forward_mha(q, latent, rotated[:, None], cache, step, torch.tensor(1.0), output)
        outputs.append(output)
    assert (prefill.chunked_context is not None) and tiles is None
    assert len(prefill.chunked_context.chunks) > 1
    assert (outputs[0] - outputs[1]).abs().max() < 1e-5


@pytest.mark.skipif(compat.versions.before((0, 28)), reason="in pinned memory, which wants a GPU")
def test_steps_of_two_builders_do_not_share_what_the_backend_was_told():
    """Of microbatches, and of a draft model beside the model: both are described, then attend."""

    class Backend:
        told = None

        def clone(self):
            return Backend()

        def prepare_metadata(self, prefill):
            self.told = prefill

    backend = Backend()
    builders = [short_prompts(backend=backend) for _ in range(2)]
    steps = []
    for builder, new in zip(builders, ([1, 80], [1, 40, 100]), strict=True):
        builder._workspace = torch.empty(128, 8)
        steps.append(builder.describe(common_metadata(new, [300, 60, 0][: len(new)]), 1)[0])
    assert [step.prefill_backend.told for step in steps] == steps
    assert backend.told is None  # the layer's own is that of vLLM's builders


@pytest.mark.parametrize("cached, kept", [([64, 0, 128], None), ([64, 128, 0], 130)])
def test_vllm_to_0_27_merges_the_context_of_every_prompt(monkeypatch, cached, kept):
    """Its count takes as many leading prompts as have one."""
    leading = types.SimpleNamespace(prefill_tokens_with_context=130)
    monkeypatch.setattr(compat, "chunked_context", lambda **_: leading)
    short = short_prompts(backend=types.SimpleNamespace(clone=unprepared))
    short._workspace = torch.empty(128, 8)
    prefill, _ = short.describe(common_metadata([70, 60, 90], cached), 0)
    assert prefill.chunked_context is leading
    assert leading.prefill_tokens_with_context == kept


def unprepared():
    """A prefill backend that takes whatever it is told."""
    return types.SimpleNamespace(prepare_metadata=lambda _: None)


def test_a_step_whose_longest_request_is_padding_has_none():
    common = common_metadata([1, 1], [900, 3])
    common.max_query_len = 512  # as of a step made up for a CUDA graph
    assert short_prompts().find(common) is None


@pytest.mark.parametrize("parallel, added", [(False, 1), (True, 2)])
def test_a_draft_model_of_its_own_begins_with_tokens_more(parallel, added):
    """Of each request: what it drafts for, by 2 tokens, is no prompt, and a prompt's context is
    whole, though the host's lengths lack them."""
    from mla_backend.attention.sparse.metadata import SparseMetadataBuilder

    name = "draft_model.model.layers.0.self_attn.attn"
    layer = sparse_layer(score_no_short_prompts=lambda _: None)
    config = types.SimpleNamespace(
        speculative_config=types.SimpleNamespace(
            method="draft_model", num_speculative_tokens=2, parallel_drafting=parallel
        ),
        parallel_config=types.SimpleNamespace(decode_context_parallel_size=1),
        compilation_config=types.SimpleNamespace(static_forward_context={name: layer}),
        model_config=types.SimpleNamespace(
            hf_text_config=types.SimpleNamespace(num_hidden_layers=3)
        ),
        use_v2_model_runner=False,
    )
    made = object.__new__(SparseMetadataBuilder)
    made.vllm_config, made.device = config, torch.device("cpu")
    made.kv_cache_spec = types.SimpleNamespace(block_size=64)
    made._expand_short_prompts([name], config)
    short = made._short_prompts
    drafted, prompt = 3 + added, 200 + added
    common = common_metadata([drafted, drafted, prompt], [100, 90, 40])
    common.seq_lens_cpu_upper_bound -= added
    assert short.find(common) == 2
    assert short.find(common_metadata([drafted, drafted], [100, 90])) is None
    common.seq_lens_cpu_upper_bound[2] += TOPK + 1 - (prompt + 40)
    assert short.find(common) is None  # it sees a token more than TOPK


def where_prompts_expand(monkeypatch, *, on_cpu=False, invariant=False, version="0.32.0"):
    from mla_backend.attention.sparse import short_prompts as module

    monkeypatch.setattr(compat.versions, "installed_vllm_version", lambda: version)
    platform = types.SimpleNamespace(is_cpu=lambda: on_cpu)
    monkeypatch.setattr(module, "current_platform", platform)
    monkeypatch.setattr(module, "vllm_envs", types.SimpleNamespace(VLLM_BATCH_INVARIANT=invariant))
    return module


def attention_config(dcp=1, **options):
    options = {"sparse_mla_force_mqa": False, "mla_prefill_backend": None, **options}
    return types.SimpleNamespace(
        attention_config=types.SimpleNamespace(**options),
        parallel_config=types.SimpleNamespace(decode_context_parallel_size=dcp),
    )


@pytest.mark.parametrize(
    "where, cache, needs",
    [
        ({"version": "0.26.0", "on_cpu": True}, "auto", ""),
        ({"version": "0.26.0"}, "auto", ""),
        ({"version": "0.33.0", "on_cpu": True}, "fp8_ds_mla", ""),
        ({}, "auto", ""),
        ({"on_cpu": True, "invariant": True}, "auto", "VLLM_BATCH_INVARIANT unset"),
        ({}, "fp8_ds_mla", "a model of bfloat16"),
    ],
)
def test_where_prompts_are_expanded(monkeypatch, where, cache, needs):
    module = where_prompts_expand(monkeypatch, **where)
    monkeypatch.setattr(compat, "mla_prefill_backend", lambda _: "FLASH_ATTN")
    arguments = cache, torch.float16, attention_config()
    assert module.are_expanded(*arguments) is not bool(needs)
    monkeypatch.setenv("MLA_BACKEND_EXPAND_PROMPTS", "0")
    assert not module.are_expanded(*arguments)
    monkeypatch.setenv("MLA_BACKEND_EXPAND_PROMPTS", "1")
    if needs:
        with pytest.raises(ValueError, match=f"{needs}.*unset MLA_BACKEND_EXPAND_PROMPTS"):
            module.are_expanded(*arguments)
    else:
        assert module.are_expanded(*arguments)


@pytest.mark.parametrize(
    "version, module, lacks",
    [
        ("0.26.0", "vllm.model_executor.layers.attention.mla_attention", ""),
        ("0.28.0", "vllm.models.deepseek_v32.attention", "model_class_overrides unset"),
        ("0.32.0", "vllm.models.deepseek_v32.attention", ""),
    ],
)
def test_layers_that_cannot_expand_on_a_gpu(monkeypatch, version, module, lacks):
    """They do not, and where that is asked for they are refused."""
    layer = type("Layer", (), {"__module__": module})()
    for on_cpu in (True, False):
        expands = where_prompts_expand(monkeypatch, version=version, on_cpu=on_cpu).can_expand
        monkeypatch.delenv("MLA_BACKEND_EXPAND_PROMPTS", raising=False)
        assert expands(layer) is (on_cpu or not lacks)
        monkeypatch.setenv("MLA_BACKEND_EXPAND_PROMPTS", "1")
        if lacks and not on_cpu:
            with pytest.raises(ValueError, match=f"{lacks}.*unset MLA_BACKEND_EXPAND_PROMPTS"):
                expands(layer)
        else:
            assert expands(layer)


@pytest.mark.parametrize("version, kept", [("0.28.0", False), ("0.29.0", True)])
def test_memory_is_kept_where_a_layer_can_expand(monkeypatch, version, kept):
    from sparse_parts import fake_indexer, make_impl

    from mla_backend.attention.sparse import impl

    where_prompts_expand(monkeypatch, version=version)
    on_gpu = types.SimpleNamespace(is_cpu=lambda: False)
    monkeypatch.setattr(impl, "current_platform", on_gpu)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    taken = []
    monkeypatch.setattr(impl, "take_over", lambda *args: taken.append(args[5]))
    other = type("Indexer", (), {"__module__": "vllm.models.deepseek_v32.attention"})()
    other.__dict__ |= vars(fake_indexer())
    make_impl(monkeypatch, indexer=other)
    assert [expanded is not None for expanded in taken] == [kept]


def test_a_layer_that_cannot_expand_gets_all_tokens_itself(monkeypatch):
    from mla_backend.attention.sparse import metadata

    layers = types.SimpleNamespace(static_forward_context={"layer": None})
    made = object.__new__(metadata.SparseMetadataBuilder)
    monkeypatch.setattr(metadata, "can_expand", lambda _: False)
    made._expand_short_prompts(["layer"], types.SimpleNamespace(compilation_config=layers))
    assert made._short_prompts is None


def test_vllm_0_26_is_told_by_lengths_which_prompts_expand(monkeypatch):
    """Its prefill metadata has no word for it; later ones have `use_dense_mha`."""
    from vllm.model_executor.layers.attention import mla_attention

    fields = {"block_table": 1, "query_start_loc": 2, "max_query_len": 3, "query_lens_cpu": 4}
    monkeypatch.setattr(mla_attention, "MLACommonPrefillMetadata", dict)
    for version, more in (("0.26.0", set()), ("0.27.1", {"query_lens_cpu", "use_dense_mha"})):
        monkeypatch.setattr(compat.versions, "installed_vllm_version", lambda v=version: v)
        assert compat.expanded_prompts(**fields).keys() == fields.keys() - {"query_lens_cpu"} | more
    asked = {}
    monkeypatch.setattr(mla_attention, "build_mla_chunked_context_metadata", asked.update)
    for version in ("0.27.1", "0.28.0"):
        asked.clear()
        monkeypatch.setattr(compat.versions, "installed_vllm_version", lambda v=version: v)
        compat.chunked_context(context_lens_cpu=[5, 0, 7])
        assert asked.get("num_prefills") == {"0.27.1": 3}.get(version)


@pytest.mark.parametrize(
    "backend, options, needs",
    [
        ("FLASH_ATTN", {}, None),
        ("FLASH_ATTN", {"sparse_mla_force_mqa": True}, "sparse_mla_force_mqa unset"),
        ("FLASH_ATTN", {"dcp": 2}, "--decode-context-parallel-size 1: a rank has a part of each"),
        ("FLASHINFER", {}, "another prefill backend"),
        (ValueError("none serves it"), {}, "another prefill backend"),
    ],
)
def test_engines_that_would_not_expand_prompts(monkeypatch, backend, options, needs):
    """FLASHINFER looks for the layers of dense attention, and fails where there are none."""
    import vllm.v1.attention.backends.mla.prefill as prefill

    def chosen(_):
        if isinstance(backend, ValueError):
            raise backend
        return types.SimpleNamespace(get_name=lambda: backend)

    monkeypatch.setattr(prefill, "get_mla_prefill_backend", chosen)
    module = where_prompts_expand(monkeypatch)
    arguments = "auto", torch.bfloat16, attention_config(**options)
    assert module.are_expanded(*arguments) is (needs is None)
    monkeypatch.setenv("MLA_BACKEND_EXPAND_PROMPTS", "1")
    if needs is None:
        assert module.are_expanded(*arguments)
    else:
        with pytest.raises(ValueError, match=needs):
            module.are_expanded(*arguments)


def test_a_prefill_backend_that_was_asked_for_is_refused_in_vllms_words(monkeypatch):
    import vllm.v1.attention.backends.mla.prefill as prefill

    def invalid(_):
        raise ValueError("Selected MLA prefill backend X is not valid")

    monkeypatch.setattr(prefill, "get_mla_prefill_backend", invalid)
    with pytest.raises(ValueError, match="prefill backend X is not valid"):
        compat.mla_prefill_backend(attention_config(mla_prefill_backend="X"))


@pytest.mark.parametrize("version, outputs", [("0.27.1", 5), ("0.28.0", 3)])
@pytest.mark.parametrize("capability, value", [((9, 0), 128), ((10, 0), 128), ((12, 0), 192)])
def test_memory_of_prompts_in_expanded_form(capability, value, version, outputs, monkeypatch):
    """By hand, of 16 heads in bf16: 8192 new tokens, and 8192 cached rows at a time."""
    monkeypatch.setattr(compat.versions, "installed_vllm_version", lambda: version)
    from mla_backend.attention.sparse.short_prompts import WORKSPACE_ROWS, ExpandedBytes

    impl = types.SimpleNamespace(
        num_heads=16, qk_head_dim=192, qk_nope_head_dim=128, v_head_dim=128
    )
    query, key, latent = 192, 192, 128 + value
    held = 8192 * (query + key + latent + outputs * value)
    held += WORKSPACE_ROWS * (key + latent + max(key, latent))
    assert ExpandedBytes.of(impl, 2, capability).at_most(8192) == 2 * 16 * held


def test_the_profile_takes_that_memory(monkeypatch):
    """No layer attends while vLLM measures, and it would give the memory to the cache."""
    from mla_backend.attention.sparse import indexer_layer as module
    from mla_backend.attention.sparse.short_prompts import ExpandedBytes

    taken, empty = [], torch.empty
    monkeypatch.setattr(module.torch, "empty", lambda n, **_: taken.append(n) or empty(0))
    choice = empty(8, 96, dtype=torch.int32)
    held = ExpandedBytes(token=1000, row=10)
    for expanded in (None, held):
        layer = module.IndexerLayer(
            4, torch.bfloat16, "fp32", "auto", None, choice, expanded_bytes=expanded
        )
        layer.profile(8)
    assert taken == [held.at_most(8)] and held.at_most(8) == 8 * 1000 + 8192 * 10
