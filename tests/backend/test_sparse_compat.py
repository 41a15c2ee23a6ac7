# SPDX-License-Identifier: Apache-2.0
"""What of vLLM leads to the sparse backend: the class of a layer, newer models' functions."""

import types

import pytest
import torch


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


def test_an_accelerator_with_a_signature_of_its_own_is_left_alone():
    """vLLM calls it with these keywords; nothing of ours is selected."""
    from vllm.platforms.interface import Platform

    from mla_backend import compat, plugin

    class Other(Platform):
        @classmethod
        def get_attn_backend_cls(cls, selected_backend, attn_selector_config, **kwargs):
            return f"stock, {kwargs}"

    compat.select_class_by_layer(Other, plugin.sparse_class_path)
    found = Other.get_attn_backend_cls(None, attn_selector_config=selector_config(), num_heads=8)
    assert found == "stock, {'num_heads': 8}"


FUSED_MODELS = ("vllm.models.deepseek_v32.attention", "vllm.models.deepseek_v32.nvidia.attention")


@pytest.fixture
def fused_model(monkeypatch, request):
    """A module of vLLM's CUDA model of DeepSeek-V3.2, in place of the real one."""
    import sys

    where = getattr(request, "param", "vllm.models.deepseek_v32.attention")
    module = types.ModuleType(where)

    def sparse_attn_indexer(
        hidden_states, k_cache_prefix, kv_cache, q_quant, q_scale, k, weights, topk_indices_buffer
    ):
        return "stock"

    module.sparse_attn_indexer = sparse_attn_indexer
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


@pytest.mark.parametrize("fused_model", FUSED_MODELS, indirect=True)
def test_fused_model_calls_our_indexer(fused_model):
    """From vLLM 0.29 the CUDA model calls a function of its module, and another model before."""
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
