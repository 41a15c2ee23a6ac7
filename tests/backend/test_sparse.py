# SPDX-License-Identifier: Apache-2.0
"""The sparse backend piece by piece, without an engine."""

import types

import pytest
import torch

BLOCK, H, RANK, ROPE, NOPE = 64, 4, 512, 64, 128
SCALE = 1 / 24


def common_metadata(query_lens, seq_lens, *, tokens=None, max_blocks=6):
    """vLLM's CommonAttentionMetadata of these requests; `tokens` counts padding too."""
    starts = torch.tensor([0, *query_lens]).cumsum(0).int()
    tables = torch.randperm(len(seq_lens) * max_blocks, generator=torch.Generator().manual_seed(1))
    return types.SimpleNamespace(
        num_reqs=len(seq_lens),
        num_actual_tokens=int(starts[-1]) if tokens is None else tokens,
        max_query_len=max(query_lens),
        query_start_loc=starts,
        query_start_loc_cpu=starts.clone(),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        block_table_tensor=tables.view(len(seq_lens), max_blocks).int(),
    )


def build_rows(*args, **kwargs):
    from mla_backend.attention.sparse.rows import RowsBuilder

    return RowsBuilder(64, torch.device("cpu")).build(common_metadata(*args, **kwargs))


def expected_rows(query_lens, seq_lens, tokens):
    ids, lengths = [], []
    for r, (new, total) in enumerate(zip(query_lens, seq_lens, strict=True)):
        ids += [r] * new
        lengths += range(total - new + 1, total + 1)
    padding = tokens - len(ids)
    return ids + [-1] * padding, lengths + [0] * padding


@pytest.mark.parametrize(
    "query_lens, seq_lens, tokens",
    [
        ([1, 5, 1, 17], [70, 5, 1, 200], 24),
        ([3, 0, 2], [3, 9, 300], 5),
        ([2, 1, 0], [65, 64, 0], 8),
        ([3, 1, 2], [70, 5, 9], 9),  # as many tokens as equal runs of 3 would have
        ([1], [1], 1),
    ],
)
def test_rows_of_a_mixed_step(query_lens, seq_lens, tokens):
    rows = build_rows(query_lens, seq_lens, tokens=tokens)
    ids, lengths = expected_rows(query_lens, seq_lens, tokens)
    assert rows.lengths.tolist() == lengths
    if rows.request_ids is None:  # then they must follow from the order alone
        runs = tokens // len(seq_lens)
        assert [t // runs for t in range(tokens)] == ids
    else:
        assert rows.request_ids.tolist() == ids


@pytest.mark.parametrize("run", [1, 4])
@pytest.mark.parametrize("padded", [0, 2])
def test_rows_of_a_decode_step_need_no_ids(run, padded):
    """Padding requests of a captured graph have no tokens; their rows see nothing."""
    query_lens, seq_lens = [run, run, run, *[0] * padded], [70, 5, 64, *[0] * padded]
    rows = build_rows(query_lens, seq_lens, tokens=run * len(seq_lens))
    assert rows.request_ids is None
    assert rows.lengths.tolist() == expected_rows(query_lens, seq_lens, run * len(seq_lens))[1]


def test_rows_keep_their_addresses():
    """What a captured graph has read must be where the next step writes."""
    from mla_backend.attention.sparse.rows import RowsBuilder

    builder = RowsBuilder(64, torch.device("cpu"))
    first = builder.build(common_metadata([1, 3], [9, 3]))
    second = builder.build(common_metadata([3, 1], [4, 8]))
    assert first.lengths.data_ptr() == second.lengths.data_ptr()
    assert first.request_ids.data_ptr() == second.request_ids.data_ptr()
    for buffer in (builder._request_ids, builder._lengths):
        buffer.fill_(-7)  # sleep mode discards what they hold
    after_sleep = builder.build(common_metadata([3, 1], [4, 8]))
    assert after_sleep.lengths.tolist() == [2, 3, 4, 8]
    assert after_sleep.request_ids.tolist() == [0, 0, 0, 1]
    assert len(builder.build(common_metadata([60, 4], [70, 8])).lengths) == 64
    with pytest.raises(ValueError, match="at most 64 tokens in a step, got 65"):
        builder.build(common_metadata([65], [65]))


@pytest.mark.parametrize("asked, support", [("auto", "UNIFORM_BATCH"), ("torch", "NEVER")])
def test_graphs_are_claimed_for_kernels_only(monkeypatch, asked, support):
    from mla_backend.attention.sparse import metadata

    monkeypatch.setenv("MLA_BACKEND_IMPL", asked)
    for builder in (metadata.SparseMetadataBuilder, metadata.IndexerMetadataBuilder):
        assert builder.get_cudagraph_support(None, None).name == support


def fake_config(topk_rows=64, dcp=1, drafts=0):
    speculative = types.SimpleNamespace(num_speculative_tokens=drafts) if drafts else None
    return types.SimpleNamespace(
        parallel_config=types.SimpleNamespace(decode_context_parallel_size=dcp),
        scheduler_config=types.SimpleNamespace(max_num_batched_tokens=topk_rows, max_num_seqs=4),
        speculative_config=speculative,
        model_config=types.SimpleNamespace(max_model_len=384),
        cache_config=types.SimpleNamespace(block_size=64),
        attention_config=types.SimpleNamespace(sparse_mla_force_mqa=False),
        compilation_config=types.SimpleNamespace(
            splitting_ops=["vllm::sparse_attn_indexer"], static_forward_context={}
        ),
    )


@pytest.mark.parametrize("batched, drafts, most", [(64, 0, 64), (3, 0, 4), (3, 2, 12)])
def test_most_tokens_of_a_step(batched, drafts, most):
    from mla_backend.attention.sparse.rows import max_tokens

    assert max_tokens(fake_config(topk_rows=batched, drafts=drafts)) == most


def make_impl(monkeypatch, kv_cache_dtype="auto", dtype=torch.float32, config=None, **changes):
    from mla_backend import compat
    from mla_backend.attention.sparse import impl as module

    monkeypatch.setattr(module, "get_current_vllm_config", lambda: config or fake_config())
    monkeypatch.setattr(compat, "mla_prefill_backend", lambda _: "CPU")
    args = {
        "num_heads": H,
        "head_size": RANK + ROPE,
        "scale": SCALE,
        "num_kv_heads": 1,
        "alibi_slopes": None,
        "sliding_window": None,
        "kv_cache_dtype": kv_cache_dtype,
        "logits_soft_cap": None,
        "attn_type": "decoder",
        "kv_sharing_target_layer_name": None,
        "topk_indices_buffer": torch.full((64, 96), -1, dtype=torch.int32),
        "kv_lora_rank": RANK,
        "qk_nope_head_dim": NOPE,
        "qk_rope_head_dim": ROPE,
        "qk_head_dim": NOPE + ROPE,
        "v_head_dim": NOPE,
        "kv_b_proj": types.SimpleNamespace(quant_method=None),
    }
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        return module.SparseMlaImpl(**args | changes)
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize(
    "kv_cache_dtype, dtype, tolerance",
    [
        ("auto", torch.float32, 1e-5),
        ("auto", torch.bfloat16, 6e-3),
        ("fp8", torch.float32, 1e-5),
        ("fp8_ds_mla", torch.bfloat16, 8e-3),
    ],
)
def test_attention_reads_the_chosen_tokens(monkeypatch, kv_cache_dtype, dtype, tolerance):
    """A chunk of a prompt, a decode token and a draft in one step; the cache around is NaN."""
    from mla_kernels.cache.rows import rows_as_float

    from mla_backend.attention.sparse.rows import RowsBuilder

    impl = make_impl(monkeypatch, kv_cache_dtype, dtype)
    query_lens, seq_lens = [6, 1, 4], [150, 64, 70]
    common = common_metadata(query_lens, seq_lens)
    rows = RowsBuilder(64, torch.device("cpu")).build(common)
    width = 656 if kv_cache_dtype == "fp8_ds_mla" else RANK + ROPE
    quantised = kv_cache_dtype != "auto"
    shape = (common.block_table_tensor.numel(), BLOCK, width)
    cache = torch.full(shape, 0x7F, dtype=torch.uint8)  # NaN in e4m3
    if not quantised:
        cache = torch.full(shape, float("nan"), dtype=dtype)
    layer = types.SimpleNamespace(_k_scale=torch.tensor(0.05))
    g = torch.Generator().manual_seed(0)
    new = [torch.randn(n, RANK + ROPE, generator=g).to(dtype) for n in seq_lens]
    slots_of = []
    for table, kv in zip(common.block_table_tensor, new, strict=True):
        position = torch.arange(len(kv))
        slots = table[position // BLOCK].long() * BLOCK + position % BLOCK
        slots_of.append(slots)
        impl.do_kv_cache_update(
            kv[:, :RANK], kv[:, None, RANK:], cache, slots, kv_cache_dtype, layer._k_scale
        )
    T = sum(query_lens)
    q = torch.randn(T, H, RANK + ROPE, generator=g).to(dtype)
    choices = [torch.randperm(n, generator=g)[:40].sort().values for n in rows.lengths.tolist()]
    for row, choice in enumerate(choices):
        impl.topk_indices_buffer[row, : len(choice)] = choice.int()
    kv_scale = None
    if kv_cache_dtype == "fp8":
        cache, kv_scale = cache.view(torch.float8_e4m3fn), layer._k_scale  # as vLLM passes it
    out, lse = impl.forward_mqa(
        q.split([RANK, ROPE], -1), cache, types.SimpleNamespace(rows=rows), layer
    )
    owner = torch.repeat_interleave(torch.arange(3), torch.tensor(query_lens)).tolist()
    for row, choice in enumerate(choices):
        kept = cache.view(-1, width)[slots_of[owner[row]][choice]]
        kv = rows_as_float(kept, dtype, RANK, RANK + ROPE, kv_scale).double()
        assert (kv - new[owner[row]][choice]).abs().max() < (0.3 if quantised else 1e-6)
        scores = q[row].double() @ kv.T * SCALE
        expected = scores.softmax(-1) @ kv[:, :RANK]
        assert (out[row].double() - expected).norm() < tolerance * expected.norm()
        assert (lse[row] - scores.logsumexp(-1)).abs().max() < max(tolerance, 1e-5)


def fake_indexer(**changes):
    op = types.SimpleNamespace(_forward_method=None)
    cache = types.SimpleNamespace(prefix="layers.0.indexer.k_cache", get_attn_backend=None)
    values = {"head_dim": 128, "n_head": 8, "topk_tokens": 96, "scale_fmt": "ue8m0"}
    buffer = torch.full((64, 96), -1, dtype=torch.int32)
    indexer = {"indexer_op": op, "k_cache": cache, "topk_indices_buffer": buffer}
    return types.SimpleNamespace(**indexer | values | changes)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"head_dim": 64}, "index_head_dim is 64; the indexer's kernels take 128"),
        ({"n_head": 65}, r"index_n_heads is 65; .* 1\.\.64"),
        ({"topk_tokens": 4096}, r"index_topk is 4096; .* 1\.\.2048"),
        ({"index_kpool": 16}, "index_kpool is 16; the indexer's kernels take 1"),
    ],
)
def test_indexer_that_the_kernels_do_not_take(monkeypatch, changes, words):
    with pytest.raises(ValueError, match=words):
        make_impl(monkeypatch, indexer=fake_indexer(**changes))


def test_the_operator_and_the_function_of_newer_models_are_taken_over(monkeypatch):
    from vllm.model_executor.models import deepseek_v2

    from mla_backend import compat
    from mla_backend.attention.sparse import indexer as module

    routed = []
    monkeypatch.setattr(deepseek_v2, "per_token_group_quant_fp8", None)  # put back afterwards
    monkeypatch.setattr(compat, "route_fused_indexer", lambda *args: routed.append(args))
    indexer = fake_indexer()
    make_impl(monkeypatch, indexer=indexer)
    assert indexer.indexer_op._forward_method is not None
    ((run, is_ours),) = routed
    assert run is module.run_indexer
    # Another engine of the process may have a layer of the same name, which is vLLM's.
    name = indexer.k_cache.prefix
    for cache, ours in ((indexer.k_cache, True), (fake_indexer().k_cache, False)):
        context = types.SimpleNamespace(no_compile_layers={name: cache})
        monkeypatch.setattr(module, "get_forward_context", lambda context=context: context)
        assert is_ours(name) is ours and not is_ours("another's")


def test_engines_of_one_process_have_their_own_indexers_and_workspaces(monkeypatch):
    """Also those whose layers have the same names and ask for the same, one after the other too."""
    import gc
    import weakref

    from vllm.model_executor.models import deepseek_v2

    from mla_backend.attention.sparse import kernel
    from mla_backend.attention.sparse.indexer_layer import attached

    def make(*args, **kwargs):
        return torch.zeros(8, dtype=torch.uint8)

    monkeypatch.setattr(deepseek_v2, "per_token_group_quant_fp8", None)  # put back afterwards
    monkeypatch.setattr(kernel, "mla_sparse_workspace", make)
    monkeypatch.setattr(kernel, "indexer_topk_workspace", make)
    formats, engines = ("ue8m0", None), [fake_config(), fake_config()]
    indexers = [fake_indexer(scale_fmt=scale_fmt) for scale_fmt in formats]
    gpu = torch.device("meta")

    def layer(config, indexer):
        impl = make_impl(monkeypatch, config=config, indexer=indexer)
        return impl, kernel.topk_workspace(config, 64, 6, gpu, "auto")

    first, second = (layer(*each) for each in zip(engines, indexers, strict=True))
    assert [attached(i.k_cache).scale_format for i in indexers] == ["ue8m0", "fp32"]
    again = layer(engines[0], fake_indexer())
    assert again[0]._workspace is first[0]._workspace and again[1] is first[1]
    assert second[0]._workspace is not first[0]._workspace and second[1] is not first[1]
    held = [weakref.ref(first[0]._workspace), weakref.ref(first[1])]
    del first, again, indexers
    gc.collect()
    assert [ref() for ref in held] == [None, None]


def test_contexts_that_the_top_k_of_a_gpu_does_not_take(monkeypatch):
    from vllm.model_executor.models import deepseek_v2

    from mla_backend.attention.sparse.indexer import take_over
    from mla_backend.attention.sparse.indexer_backend import IndexerBackend
    from mla_backend.attention.sparse.indexer_layer import attached
    from mla_backend.attention.sparse.kernel import SparseKernel

    monkeypatch.setattr(deepseek_v2, "per_token_group_quant_fp8", None)  # put back afterwards
    config = fake_config()
    config.model_config.max_model_len = 2**20 + 1
    gpu = torch.device("meta")

    def take(impl, device):
        kernel = SparseKernel("auto", impl, "pow2", False, fp8_products=device == gpu)
        indexer = fake_indexer()
        take_over(indexer, kernel, IndexerBackend, config, device)
        layer = attached(indexer.k_cache)
        assert layer.fp8_products is kernel.fp8_products
        assert (layer.workspace is not None) == (device == gpu and impl == "auto")

    with pytest.raises(
        ValueError, match=r"max_model_len 1048577 .* among 1048576 tokens .* Mend: lower --max-mod"
    ):
        take("auto", gpu)
    take("torch", gpu)  # torch takes any
    take("auto", torch.device("cpu"))
    config.model_config.max_model_len = 2**20
    take("auto", gpu)


def test_decode_context_parallelism_is_refused(monkeypatch):
    """By the class, in the versions that ask, and by the layer."""
    from mla_backend.attention.sparse.backend import SparseMlaBackend

    assert SparseMlaBackend.get_impl_cls().supports_dcp is False
    reason = (
        "sparse attention with decode context parallelism. Mend: --decode-context-parallel-size 1$"
    )
    with pytest.raises(ValueError, match=reason):
        make_impl(monkeypatch, config=fake_config(dcp=2))


def test_more_heads_than_the_kernels_take_are_refused(monkeypatch):
    with pytest.raises(ValueError, match="132 query heads on one rank; the kernels take 128"):
        make_impl(monkeypatch, num_heads=132)


@pytest.mark.parametrize("name, value", [("sliding_window", 4), ("attn_type", "encoder_only")])
def test_layer_options_are_refused(monkeypatch, name, value):
    with pytest.raises(ValueError, match=f"{name}={value}"):
        make_impl(monkeypatch, **{name: value})


@pytest.mark.parametrize(
    "text_config, words",
    [
        ({"model_type": "hy_v4", "learnable_sink": True}, "learnable attention sinks.*Mend"),
        ({"model_type": "dots3_note"}, "dots3_note, to whose layers.*Mend"),
    ],
)
def test_models_that_vllm_gives_in_part_are_refused(monkeypatch, text_config, words):
    config = fake_config()
    config.model_config.hf_text_config = types.SimpleNamespace(**text_config)
    with pytest.raises(ValueError, match=f"^mla-backend cannot serve {words}"):
        make_impl(monkeypatch, config=config)
    config.model_config.hf_text_config = types.SimpleNamespace(
        model_type="hy_v4", learnable_sink=False
    )
    make_impl(monkeypatch, config=config)


def test_caches_in_the_memory_of_the_host_are_refused(monkeypatch):
    config = fake_config()
    config.attention_config.hisparse_config = None
    make_impl(monkeypatch, config=config)
    config.attention_config.hisparse_config = types.SimpleNamespace()
    with pytest.raises(
        ValueError, match=r"HiSparse \(KV caches .* Mend: leave hisparse_config out"
    ):
        make_impl(monkeypatch, config=config)


def choose_kernel(device, cache=torch.bfloat16, heads=16):
    """The kernels of an engine in bf16, and what is told of them."""
    from mla_kernels.layouts import MlaDims

    from mla_backend.attention.sparse.kernel import SparseKernel
    from mla_backend.stats import STATS

    return SparseKernel.choose(device, MlaDims(), torch.bfloat16, cache, heads), STATS.sparse


@pytest.mark.parametrize("rescale, on_cpu", [("amla", True), ("amla", False), ("flash", False)])
def test_other_rescales_are_refused(monkeypatch, h200, rescale, on_cpu):
    device = torch.device("cpu") if on_cpu else h200
    monkeypatch.setenv("MLA_BACKEND_RESCALE", rescale)
    with pytest.raises(ValueError, match=f"MLA_BACKEND_RESCALE={rescale} with a sparse model"):
        choose_kernel(device)


@pytest.mark.parametrize(
    "env, rescale",
    [
        ({}, "flash"),
        ({"MLA_BACKEND_IMPL": "torch"}, "flash"),
        ({"MLA_BACKEND_IMPL": "reference"}, "pow2"),
        ({"MLA_BACKEND_RESCALE": "pow2"}, "pow2"),
    ],
)
def test_rescale_of_an_engine_on_a_cpu(monkeypatch, env, rescale):
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    chosen, stats = choose_kernel(torch.device("cpu"))
    assert chosen.rescale == stats["rescale"] == rescale


@pytest.fixture
def h200(monkeypatch):
    """A device that says it is an sm_90."""
    from mla_kernels import dispatch
    from mla_kernels.arch import ARCHS

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(dispatch, "device_arch", lambda device: ARCHS[90])
    return torch.device("cuda:0")


@pytest.mark.parametrize(
    "heads, cache, env, kernel, indexer, why",
    [
        (8, torch.uint8, {}, "triton", "auto", "faster for so few heads"),
        (16, torch.uint8, {}, "triton", "auto", "faster for so few heads"),
        (32, torch.uint8, {}, "hopper", "auto", "arguments fit"),
        (128, torch.uint8, {}, "hopper", "auto", "arguments fit"),
        (16, torch.bfloat16, {}, "hopper", "auto", "arguments fit"),
        (16, torch.float8_e4m3fn, {}, "triton", "auto", "a cache of"),
        (16, torch.uint8, {"VLLM_BATCH_INVARIANT": "1"}, "hopper", "auto", "arguments fit"),
        (16, torch.uint8, {"MLA_BACKEND_IMPL": "hopper"}, "hopper", "auto", "by name"),
        (128, torch.uint8, {"MLA_BACKEND_IMPL": "triton"}, "triton", "triton", "by name"),
    ],
)
def test_kernel_of_an_engine(monkeypatch, h200, heads, cache, env, kernel, indexer, why):
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    chosen, stats = choose_kernel(h200, cache, heads)
    assert (chosen.attention, chosen.indexer) == (kernel, indexer)
    assert chosen.rescale == "pow2"
    assert chosen.deterministic is ("VLLM_BATCH_INVARIANT" in env)
    assert stats["impl"] == kernel and why in stats["reason"]
    assert chosen.fp8_products is False


@pytest.mark.parametrize("asked", [False, True])
def test_an_indexer_multiplies_in_fp8_if_asked_to(monkeypatch, h200, asked):
    from mla_backend.attention.sparse import indexer_layer, kernel
    from mla_backend.attention.sparse.rows import TokenRows

    said = []
    monkeypatch.setattr(kernel.logger, "info_once", lambda text, *_: said.append(text))
    monkeypatch.setenv("MLA_BACKEND_FP8_INDEXER", "1" if asked else "0")
    chosen, _ = choose_kernel(h200, torch.uint8, 128)
    assert chosen.fp8_products is asked
    assert any("MLA_BACKEND_FP8_INDEXER=1 makes" in text for text in said) is not asked
    given = {}
    monkeypatch.setattr(indexer_layer, "indexer_topk", lambda *_, **known: given.update(known))
    topk = torch.zeros(2, 4, dtype=torch.int32, device="meta")
    layer = indexer_layer.IndexerLayer(
        8, torch.bfloat16, "ue8m0", "auto", None, topk, fp8_products=chosen.fp8_products
    )
    ones = torch.ones(2, dtype=torch.int32)
    rows = TokenRows(torch.zeros(2, 1, dtype=torch.int32), ones, None, ones)
    layer.run(torch.zeros(2, 8, 128), None, torch.zeros(2, 8), topk, None, rows, ones)
    assert given["fp8_products"] is asked


def test_what_a_layer_tells_its_kernel_with_every_call(monkeypatch):
    """How it rescales, and in batch-invariant mode that it shall cut rows alike."""
    from vllm import envs as vllm_envs

    from mla_backend.attention.sparse import impl as module

    told, attend = [], module.mla_sparse_attention

    def record(*args, **options):
        told.append((options["rescale"], options["deterministic"]))
        return attend(*args, **options)

    monkeypatch.setattr(module, "mla_sparse_attention", record)
    layer = types.SimpleNamespace(_k_scale=None)
    cache = torch.zeros(2, BLOCK, RANK + ROPE)
    for mode in (False, True):
        monkeypatch.setattr(vllm_envs, "VLLM_BATCH_INVARIANT", mode)
        step = types.SimpleNamespace(rows=build_rows([1], [1]))
        make_impl(monkeypatch).forward_mqa(torch.zeros(1, H, RANK + ROPE), cache, step, layer)
    monkeypatch.setenv("MLA_BACKEND_RESCALE", "pow2")
    make_impl(monkeypatch).forward_mqa(torch.zeros(1, H, RANK + ROPE), cache, step, layer)
    assert told == [("flash", False), ("flash", True), ("pow2", True)]


def test_the_top_k_buffer_of_a_layer(monkeypatch):
    """Its indexer's own, else the one that layers share."""
    shared, own = (torch.full((64, 96), -1, dtype=torch.int32) for _ in range(2))
    indexer = fake_indexer()
    indexer.topk_indices_buffer = own
    for given in (shared, None):
        impl = make_impl(monkeypatch, indexer=indexer, topk_indices_buffer=given)
        assert impl.topk_indices_buffer is own
    assert make_impl(monkeypatch, topk_indices_buffer=shared).topk_indices_buffer is shared
    said = "mla-backend cannot serve a sparse layer without an indexer and without a top-k buffer"
    with pytest.raises(ValueError, match=said):
        make_impl(monkeypatch, topk_indices_buffer=None)


def test_a_layer_reads_where_its_indexer_writes(monkeypatch):
    """vLLM's speculators give a draft's indexers another buffer after its layers are built."""
    before, after = (torch.full((64, 96), choice, dtype=torch.int32) for choice in (-1, 0))
    indexer = fake_indexer(topk_indices_buffer=before)
    impl = make_impl(monkeypatch, indexer=indexer)
    indexer.topk_indices_buffer = after
    assert impl.topk_indices_buffer is after
    layer = types.SimpleNamespace(_k_scale=None)
    cache = torch.ones(2, BLOCK, RANK + ROPE)
    step = types.SimpleNamespace(rows=build_rows([1], [1]))
    out, _ = impl.forward_mqa(torch.zeros(1, H, RANK + ROPE), cache, step, layer)
    assert (out == 1).all()  # of no token it would be 0
    impl.topk_indices_buffer = before
    assert impl.topk_indices_buffer is before


def test_kernel_of_a_layer_is_that_of_its_heads(monkeypatch):
    from mla_backend.attention.sparse import kernel

    few, choose = [], kernel.choose_sparse_impl

    def record(*args, **known):
        few.append(known["few"])
        return choose(*args, **known)

    monkeypatch.setattr(kernel, "choose_sparse_impl", record)
    for heads, cache in ((16, "fp8_ds_mla"), (17, "fp8_ds_mla"), (16, "auto")):
        make_impl(monkeypatch, cache, torch.bfloat16, num_heads=heads)
    assert few == [True, False, False]


def test_indexer_is_taken_over_and_others_are_not(monkeypatch):
    """The step of a taken-over indexer: keys written, top-k found, both for the real rows only."""
    from mla_kernels.indexer.cache import quantise_keys
    from vllm.model_executor.models import deepseek_v2

    from mla_backend.attention.sparse import indexer as module
    from mla_backend.attention.sparse.indexer_backend import IndexerBackend
    from mla_backend.attention.sparse.metadata import IndexerMetadata
    from mla_backend.attention.sparse.rows import RowsBuilder

    monkeypatch.setattr(deepseek_v2, "per_token_group_quant_fp8", None)
    config, indexer = fake_config(), fake_indexer()
    make_impl(monkeypatch, indexer=indexer, config=config)
    assert config.compilation_config.splitting_ops[1:] == [f"vllm::{module.OP_NAME}"]
    assert indexer.k_cache.get_attn_backend() is IndexerBackend
    assert IndexerBackend.supports_batch_invariance()
    assert deepseek_v2.per_token_group_quant_fp8 is module.quantise_queries

    common = common_metadata([130], [130], max_blocks=3)
    rows = RowsBuilder(130, torch.device("cpu")).build(common)
    indexer.topk_indices_buffer = torch.full((131, 96), 7, dtype=torch.int32)
    position = torch.arange(130)
    slots = common.block_table_tensor[0][position // 64].long() * 64 + position % 64
    cache = torch.full((3, 64, 132), 0x7F, dtype=torch.uint8)
    name, indexer.k_cache.kv_cache = indexer.k_cache.prefix, cache
    context = types.SimpleNamespace(
        attn_metadata={name: IndexerMetadata(rows, slots)},
        no_compile_layers={name: indexer.k_cache},
    )
    monkeypatch.setattr(module, "get_forward_context", lambda: context)
    g = torch.Generator().manual_seed(3)
    k, q = torch.randn(131, 128, generator=g), torch.randn(131 * 8, 128, generator=g)
    codes, scales = module.quantise_queries(q, 128, use_ue8m0=True)
    weights = torch.randn(131, 8, generator=g) * scales.view(131, 8)
    indexer.indexer_op._forward_method(None, codes.view(131, 8, 128), k, weights)

    key_codes, key_scales = quantise_keys(k[:130], "ue8m0")
    keys = key_codes.view(torch.float8_e4m3fn).double() * key_scales[:, None]
    dots = torch.einsum("thd,sd->ths", codes.view(131, 8, 128)[:130].double(), keys).relu()
    scores = torch.einsum("ths,th->ts", dots, weights[:130].double())
    for t in range(130):
        best = scores[t, : t + 1].topk(min(96, t + 1)).indices.sort().values.tolist()
        assert indexer.topk_indices_buffer[t].tolist() == best + [-1] * (96 - len(best))
    assert (indexer.topk_indices_buffer[130] == 7).all()


def test_queries_are_quantised_as_the_report_says():
    from mla_backend.attention.sparse.indexer import quantise_queries

    x = torch.randn(5, 256, generator=torch.Generator().manual_seed(0)) * 30
    x[0, :128] = 0
    for ue8m0 in (True, False):
        codes, scales = quantise_queries(x, 128, column_major_scales=False, use_ue8m0=ue8m0)
        assert codes.shape == (5, 256) and codes.dtype == torch.float8_e4m3fn
        assert scales.shape == (5, 2)
        amax = x.view(5, 2, 128).abs().amax(-1)
        assert (amax <= 448 * scales * 1.0001).all()
        if ue8m0:
            assert (scales.log2() == scales.log2().round()).all()
            assert (amax[1:] > 224 * scales[1:]).all()
        back = codes.float().view(5, 2, 128) * scales[..., None]
        assert ((back - x.view(5, 2, 128)).abs() <= amax[..., None] / 14).all()


def selector_config(**changes):
    """vLLM's AttentionSelectorConfig for one MLA layer of DeepSeek-V3, with `changes`."""
    from vllm.v1.attention.selector import AttentionSelectorConfig

    config = AttentionSelectorConfig(
        head_size=576, dtype=torch.bfloat16, kv_cache_dtype="auto", block_size=64, use_mla=True
    )
    return config._replace(**changes)


def test_class_by_layer_on_an_accelerator():
    """vLLM's CUDA platform resolves one class a name; sparse layers of ours are caught before."""
    from vllm.platforms.interface import DeviceCapability
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from mla_backend import compat, plugin

    class Platform:
        @classmethod
        def get_device_capability(cls):
            return DeviceCapability(9, 0)

        @classmethod
        def get_attn_backend_cls(cls, selected_backend, attn_selector_config, num_heads=None):
            return f"stock of {cls.__name__}, {num_heads} heads"

    class Cuda(Platform):
        pass

    plugin.register()
    compat.select_class_by_layer(Cuda, plugin.sparse_class_path)
    once = Cuda.get_attn_backend_cls.__func__
    compat.select_class_by_layer(Cuda, plugin.sparse_class_path)
    assert Cuda.get_attn_backend_cls.__func__ is once
    stock = "stock of Cuda, 8 heads"
    cases = [
        (AttentionBackendEnum.CUSTOM, True, plugin.SPARSE_BACKEND_CLASS),
        (AttentionBackendEnum.CUSTOM, False, stock),
        (AttentionBackendEnum.FLASHMLA_SPARSE, True, stock),
        (None, True, stock),
    ]
    for backend, sparse, path in cases:
        layer = selector_config(use_sparse=sparse)
        assert Cuda.get_attn_backend_cls(backend, layer, num_heads=8) == path
    with pytest.raises(ValueError, match=r"KV cache dtype fp8_e5m2; supported: .*fp8_ds_mla"):
        layer = selector_config(use_sparse=True, kv_cache_dtype="fp8_e5m2")
        Cuda.get_attn_backend_cls(AttentionBackendEnum.CUSTOM, layer)


@pytest.fixture
def fused_model(monkeypatch):
    """A module of vLLM's CUDA model of DeepSeek-V3.2, in place of the real one."""
    import sys

    module = types.ModuleType("vllm.models.deepseek_v32.attention")

    def sparse_attn_indexer(
        hidden_states, k_cache_prefix, kv_cache, q_quant, q_scale, k, weights, topk_indices_buffer
    ):
        return "stock"

    module.sparse_attn_indexer = sparse_attn_indexer
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


def test_fused_model_calls_our_indexer(fused_model):
    """From vLLM 0.29 the CUDA model calls a function of its module."""
    from mla_backend import compat

    calls = []
    for _ in range(2):
        compat.route_fused_indexer(lambda *args: calls.append(args), lambda name: name == "ours")
    arguments = ("hidden", "ours", "cache", "q", None, None, "weights", "topk")
    assert fused_model.sparse_attn_indexer(*arguments) == "topk"
    assert calls == [("q", None, "weights", "topk", "ours")]
    assert fused_model.sparse_attn_indexer("hidden", "theirs", *arguments[2:]) == "stock"
    assert len(calls) == 1


@pytest.mark.parametrize("mx_scales", [False, True])
def test_scales_that_the_indexer_cannot_read_are_refused(fused_model, monkeypatch, mx_scales):
    """vLLM 0.33 writes an indexer's keys with MX scales on sm_100."""
    import sys

    from mla_backend import compat

    writer = types.ModuleType("vllm.models.deepseek_v32.common.kernels")
    writer.mqa_logits_use_mx_scales = lambda: mx_scales
    monkeypatch.setitem(sys.modules, writer.__name__, writer)
    stock = fused_model.sparse_attn_indexer
    for _ in range(2):
        if mx_scales:
            with pytest.raises(ValueError, match=r"MX scales.*read fp32 scales\. Mend: vLLM 0\.32"):
                compat.route_fused_indexer(lambda *args: None, lambda name: True)
        else:
            compat.route_fused_indexer(lambda *args: None, lambda name: True)
    assert (fused_model.sparse_attn_indexer is stock) is mx_scales


@pytest.mark.parametrize("equal_runs", [True, False])
def test_tokens_that_may_choose_all_are_not_scored(monkeypatch, equal_runs):
    """On a CPU; the others are, and all choose as the op does."""
    from mla_kernels import indexer_topk

    from mla_backend.attention.sparse import indexer_layer

    k, query_lens, seq_lens = 16, [2, 2, 2, 2], [17, 16, 70, 1]
    if not equal_runs:
        query_lens = [1, 3, 2, 1]
    T = sum(query_lens)
    rows = build_rows(query_lens, seq_lens)
    assert (rows.request_ids is None) is equal_runs
    g = torch.Generator().manual_seed(0)
    q = torch.randn(T + 1, 4, 128, generator=g).to(torch.float8_e4m3fn)  # a row of padding
    cache = torch.randn(24, BLOCK, 128, generator=g).bfloat16()
    weights = torch.randn(T + 1, 4, generator=g)
    want = indexer_topk(
        *(q[:T], cache, weights[:T], rows.block_table, rows.seq_lens, k),
        request_ids=rows.request_ids,
        lengths=rows.lengths,
    )
    scored = []

    def record(q, *args, **options):
        scored.append(len(q))
        return indexer_topk(q, *args, **options)

    monkeypatch.setattr(indexer_layer, "indexer_topk", record)
    chosen = torch.full((T + 3, k), -9, dtype=torch.int32)
    layer = indexer_layer.IndexerLayer(4, torch.bfloat16, "fp32", "torch", None, chosen)
    layer.run(q, None, weights, chosen, cache, rows, None)
    assert torch.equal(chosen[:T], want) and (chosen[T:] == -9).all()
    assert scored == [T if equal_runs else int((rows.lengths > k).sum())]
    scored.clear()
    few = build_rows([3, 1], [k, 4])
    layer.run(q, None, weights, chosen, cache, few, None)
    assert chosen[:4].tolist() == [[*range(n), *[-1] * (k - n)] for n in few.lengths.tolist()]
    layer.run(q, None, weights, chosen, cache, build_rows([2, 2], [k, 4]), None)
    assert scored == []
    many = build_rows([2, 2], [70, 80])
    layer.run(q, None, weights, chosen, cache, many, None)
    assert scored == [4]
