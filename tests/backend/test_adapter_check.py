# SPDX-License-Identifier: Apache-2.0
"""Adapters are refused for the models that have this backend's layers, and for no others."""

from types import SimpleNamespace

import pytest
import torch

from mla_backend.attention.adapters import refuse_absorbed_adapters
from mla_backend.refusals import RefusalError

ADAPTER = SimpleNamespace(loras={"layers.0.self_attn.kv_b_proj": 1, "layers.0.self_attn.o_proj": 2})


class Impl:
    pass


def load(impl, modules=tuple(ADAPTER.loras)):
    """What vLLM's worker loads for a model with a layer of that implementation."""
    from vllm.lora.worker_manager import WorkerLoRAManager

    model = torch.nn.Sequential(torch.nn.Identity())
    model[0].impl = impl
    manager = object.__new__(WorkerLoRAManager)
    manager._adapter_manager = SimpleNamespace(modules=dict.fromkeys(modules), model=model)
    return manager._load_adapter(SimpleNamespace(lora_name="mine"))


def test_only_models_of_this_backend_refuse(monkeypatch):
    from vllm.lora.worker_manager import WorkerLoRAManager

    monkeypatch.setattr(WorkerLoRAManager, "_load_adapter", lambda self, request: ADAPTER)
    ours, second, without = Impl(), Impl(), Impl()
    for impl in (ours, second):
        refuse_absorbed_adapters(impl, SimpleNamespace(lora_config=object()))
    refuse_absorbed_adapters(without, SimpleNamespace(lora_config=None))
    for impl in (ours, second):
        with pytest.raises(RefusalError, match=r"adapter mine, .*0\.self_attn\.kv_b_proj \(one of"):
            load(impl)
        assert load(impl, ["layers.0.self_attn.o_proj"]) is ADAPTER
    for impl in (Impl(), without, None):
        assert load(impl) is ADAPTER
