# SPDX-License-Identifier: Apache-2.0
"""Which kernels a sparse engine takes, and how they compute."""

import pytest
import torch


@pytest.fixture
def h200(monkeypatch):
    """A device that says it is an sm_90."""
    from mla_kernels import dispatch
    from mla_kernels.arch import ARCHS

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(dispatch, "device_arch", lambda device: ARCHS[90])
    return torch.device("cuda:0")


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


@pytest.mark.parametrize(
    "cache, warns", [(torch.float8_e4m3fn, True), (torch.uint8, False), (torch.bfloat16, False)]
)
def test_fp8_is_not_the_cache_that_vllms_sparse_backend_takes_it_for(
    monkeypatch, h200, cache, warns
):
    from mla_backend.attention.sparse import kernel

    said = []
    monkeypatch.setattr(kernel.logger, "warning_once", said.append)
    choose_kernel(h200, cache, 128)
    choose_kernel(torch.device("cpu"), cache, 128)
    assert all("--kv-cache-dtype fp8_ds_mla" in text for text in said)
    assert len(said) == warns


@pytest.mark.parametrize(
    "env, on",
    [
        ({}, True),
        ({"MLA_BACKEND_FP8_INDEXER": "0"}, False),
        ({"MLA_BACKEND_FP8_INDEXER": "1"}, True),
        ({"MLA_BACKEND_IMPL": "hopper"}, True),
        ({"MLA_BACKEND_IMPL": "triton"}, False),
        ({"MLA_BACKEND_IMPL": "torch"}, False),
        ({"VLLM_BATCH_INVARIANT": "1"}, False),
        ({"VLLM_BATCH_INVARIANT": "1", "MLA_BACKEND_FP8_INDEXER": "1"}, True),
    ],
)
def test_an_indexer_multiplies_in_fp8_unless_told_otherwise(monkeypatch, h200, env, on):
    from mla_backend.attention.sparse import indexer_layer
    from mla_backend.attention.sparse.rows import TokenRows

    for name, value in env.items():
        monkeypatch.setenv(name, value)
    chosen, stats = choose_kernel(h200, torch.uint8, 128)
    assert chosen.fp8_products is on
    assert stats["scores"] == ("products in fp8" if on else "exact products")
    given = {}
    monkeypatch.setattr(indexer_layer, "indexer_topk", lambda *_, **known: given.update(known))
    topk = torch.zeros(2, 4, dtype=torch.int32, device="meta")
    layer = indexer_layer.IndexerLayer(
        8,
        torch.bfloat16,
        "ue8m0",
        "auto",
        None,
        topk,
        fp8_products=chosen.fp8_products,
        deterministic=chosen.deterministic,
    )
    ones = torch.ones(2, dtype=torch.int32)
    rows = TokenRows(torch.zeros(2, 1, dtype=torch.int32), ones, None, ones)
    layer.run(torch.zeros(2, 8, 128), None, torch.zeros(2, 8), topk, None, rows, ones)
    assert given["fp8_products"] is on
    assert given["deterministic"] is ("VLLM_BATCH_INVARIANT" in env)


@pytest.mark.parametrize("device", ["cpu", "sm_100"])
def test_other_devices_have_exact_scores(monkeypatch, h200, device):
    if device == "sm_100":
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    chosen, stats = choose_kernel(torch.device("cpu") if device == "cpu" else h200, torch.uint8)
    assert chosen.fp8_products is False and stats["scores"] == "exact products"
