# SPDX-License-Identifier: Apache-2.0
"""A sparse attention layer: the tokens it reads, its top-k buffer, what it refuses."""

import types

import pytest
import torch
from sparse_parts import (
    BLOCK,
    RANK,
    ROPE,
    SCALE,
    H,
    build_rows,
    common_metadata,
    fake_config,
    fake_indexer,
    make_impl,
)


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


@pytest.mark.parametrize(
    "on_cpu, config, reason",
    [
        (True, {"dcp": 2}, "cannot serve decode context parallelism of 2 ranks on a CPU. Mend: --"),
        (False, {"dcp": 2, "drafts": 3, "method": "draft_model"}, "a draft model of its own .* "
         "with decode context parallelism, .* Mend: .*-size 1, or another method in --specula"),
        (False, {"dcp": 2, "ubatches": 2}, r"2 microbatches \(--enable-dbo\) under .*Mend: leave "
         "out --enable-dbo, or --decode-context-parallel-size 1$"),
        (False, {"dcp": 33}, "132 query heads on one rank; the kernels take 128"),
    ],
)  # fmt: skip
def test_context_parallelism_that_is_not_served_is_refused(monkeypatch, on_cpu, config, reason):
    """By the layer: vLLM before 0.30 asks no class, and none about drafts."""
    from mla_backend.attention.sparse import impl
    from mla_backend.attention.sparse.backend import SparseMlaBackend

    assert SparseMlaBackend.get_impl_cls().supports_dcp is True
    platform = types.SimpleNamespace(is_cpu=lambda: on_cpu)
    monkeypatch.setattr(impl, "current_platform", platform)
    with pytest.raises(ValueError, match=reason):
        make_impl(monkeypatch, config=fake_config(**config))


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
        ({"model_type": "hy_v4", "learnable_sink": True}, "learnable .*sinks.*Mend: what it names"),
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
