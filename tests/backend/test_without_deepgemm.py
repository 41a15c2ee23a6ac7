# SPDX-License-Identifier: Apache-2.0
"""vLLM's operator of the indexer, which asks for DeepGEMM on CUDA, where ours takes its place."""

import inspect
import sys
import types

import pytest
import torch
from vllm.config import AttentionConfig, VllmConfig, set_current_vllm_config
from vllm.model_executor import layers
from vllm.model_executor.layers import sparse_attn_indexer as module
from vllm.platforms import current_platform
from vllm.utils import import_utils
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from mla_backend import compat, plugin

WORDS = "Sparse Attention Indexer CUDA op requires DeepGEMM"


@pytest.fixture
def cuda(monkeypatch):
    """`cuda(deepgemm)`: as on a CUDA device with or without it, with vLLM's own function."""

    def pretend(deepgemm):
        monkeypatch.setattr(type(current_platform), "is_cuda", lambda self: True)
        for place in (import_utils, module):
            monkeypatch.setattr(place, "has_deep_gemm", lambda: deepgemm)

    return pretend


def build(backend):
    """The operator, as a model builds it before the class of its layer is chosen."""
    attention = AttentionConfig(backend=AttentionBackendEnum[backend])
    values = {
        "k_cache": types.SimpleNamespace(prefix="layers.0.indexer.k_cache"),
        "quant_block_size": 128,
        "scale_fmt": "ue8m0",
        "topk_tokens": 2048,
        "head_dim": 128,
        "max_model_len": 4096,
        "max_total_seq_len": 4096,
        "topk_indices_buffer": torch.empty(64, 2048, dtype=torch.int32),
    }
    assert set(values) <= set(inspect.signature(module.SparseAttnIndexer).parameters)
    with set_current_vllm_config(VllmConfig(attention_config=attention)):
        return module.SparseAttnIndexer(**values)


def test_it_is_built_where_this_backend_is_selected(cuda):
    plugin.register()  # names CUSTOM; on a CPU it mends nothing
    cuda(deepgemm=False)
    with pytest.raises(RuntimeError, match=WORDS):
        build("CUSTOM")
    compat.build_indexers_without_deepgemm(plugin.is_selected)
    build("CUSTOM")
    with pytest.raises(RuntimeError, match=WORDS):  # other backends need it
        build("FLASHMLA_SPARSE")
    once = module.has_deep_gemm
    compat.build_indexers_without_deepgemm(plugin.is_selected)
    assert module.has_deep_gemm is once


def test_nothing_is_changed_where_deepgemm_is(cuda):
    cuda(deepgemm=True)
    stock = module.has_deep_gemm
    compat.build_indexers_without_deepgemm(plugin.is_selected)
    assert module.has_deep_gemm is stock
    build("FLASHMLA_SPARSE")


def test_a_module_that_cannot_be_imported_is_no_fault_of_other_models(cuda, monkeypatch):
    cuda(deepgemm=False)
    monkeypatch.setitem(sys.modules, module.__name__, None)
    monkeypatch.delattr(layers, "sparse_attn_indexer")
    compat.build_indexers_without_deepgemm(plugin.is_selected)


def test_the_plugin_asks_for_it_on_an_accelerator(monkeypatch):
    asked = []
    monkeypatch.setattr(compat, "build_indexers_without_deepgemm", asked.append)
    monkeypatch.setattr(compat, "select_class_by_layer", lambda *args: None)
    plugin.register()
    assert asked == []
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)
    plugin.register()
    assert asked == [plugin.is_selected]
