# SPDX-License-Identifier: Apache-2.0
"""vLLM's indexer, taken over: its keys, scores and choices."""

import os
import subprocess
import sys
import types

import pytest
import torch
from sparse_parts import BLOCK, build_rows, common_metadata, fake_config, fake_indexer, make_impl


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
        kernel = SparseKernel("auto", impl, "pow2", impl == "torch", fp8_products=device == gpu)
        indexer = fake_indexer()
        take_over(indexer, kernel, IndexerBackend, config, device)
        layer = attached(indexer.k_cache)
        assert layer.fp8_products is kernel.fp8_products
        assert layer.deterministic is kernel.deterministic
        assert (layer.workspace is not None) == (device == gpu and impl == "auto")

    with pytest.raises(
        ValueError, match=r"max_model_len 1048577 .* among 1048576 tokens .* Mend: lower --max-mod"
    ):
        take("auto", gpu)
    take("torch", gpu)  # torch takes any
    take("auto", torch.device("cpu"))
    config.model_config.max_model_len = 2**20
    take("auto", gpu)


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


@pytest.mark.parametrize(
    "query_lens, seq_lens", [([40], [40]), ([20, 20], [20, 40]), ([20, 20], [30, 20])]
)
def test_prompts_of_equal_length_are_scored_for_what_sees_more(monkeypatch, query_lens, seq_lens):
    """One alone in its step has as many new tokens as all others."""
    from mla_kernels import indexer_topk

    from mla_backend.attention.sparse import indexer_layer

    k, rows = 16, build_rows(query_lens, seq_lens)
    assert rows.request_ids is None
    T = len(rows.lengths)
    g = torch.Generator().manual_seed(0)
    q = torch.randn(T, 4, 128, generator=g).to(torch.float8_e4m3fn)
    cache = torch.randn(24, BLOCK, 128, generator=g).bfloat16()
    weights = torch.randn(T, 4, generator=g)
    want = indexer_topk(q, cache, weights, rows.block_table, rows.seq_lens, k, lengths=rows.lengths)
    scored = []

    def record(q, *args, **options):
        scored.append(len(q))
        return indexer_topk(q, *args, **options)

    monkeypatch.setattr(indexer_layer, "indexer_topk", record)
    chosen = torch.full((T, k), -9, dtype=torch.int32)
    layer = indexer_layer.IndexerLayer(4, torch.bfloat16, "fp32", "torch", None, chosen)
    layer.run(q, None, weights, chosen, cache, rows, None)
    assert torch.equal(chosen, want)
    assert scored == [int((rows.lengths > k).sum())] and scored[0] < T


def test_graphs_that_break_where_they_are_captured_break_at_the_indexer():
    """With VLLM_USE_BREAKABLE_CUDAGRAPH=1 vLLM reads no list of ops to split at."""
    code = """
import torch
from vllm.compilation import breakable_cudagraph as vllm
from mla_backend.attention.sparse import indexer

class Capture:
    _capturing = True
    eager = []
    add_eager = eager.append

vllm.BreakableCUDAGraphCapture.current = classmethod(lambda cls: Capture)
for name in ("weak_ref_tensor", "_weak_ref_capture_arg"):  # which asks for a GPU
    if hasattr(vllm, name):
        setattr(vllm, name, lambda x: x)
ran = []
indexer.run_indexer = lambda *args: ran.append(args)
x = torch.zeros(1)
indexer._op(x, x, x, x, "layer")
assert not ran and len(Capture.eager) == 1, (ran, Capture.eager)
Capture.eager[0]()
assert len(ran) == 1
"""
    env = os.environ | {"VLLM_USE_BREAKABLE_CUDAGRAPH": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
