# SPDX-License-Identifier: Apache-2.0
"""What a worker says of itself for /mla/info."""

from types import SimpleNamespace

from mla_backend.worker import WorkerExtension


def layer(backend, **attributes):
    named = SimpleNamespace(get_name=lambda: backend)
    return SimpleNamespace(get_attn_backend=lambda: named, **attributes)


def test_backends_are_those_of_the_layers():
    """vLLM gives some layers another than the one asked for; an indexer's cache has none."""
    worker = WorkerExtension()
    assert worker.mla_backend_stats()["backends"] == {}
    layers = {
        "model.layers.0": layer("CUSTOM", impl=None),
        "model.layers.0.indexer": layer("MLA_INDEXER"),
        "model.layers.1": layer("FLASHMLA_SPARSE", impl=None),
        "model.layers.2": layer("FLASHMLA_SPARSE", impl=None),
        "model.layers.2.experts": SimpleNamespace(),
    }
    compilation = SimpleNamespace(static_forward_context=layers)
    worker.vllm_config = SimpleNamespace(compilation_config=compilation)
    assert worker.mla_backend_stats()["backends"] == {"CUSTOM": 1, "FLASHMLA_SPARSE": 2}
