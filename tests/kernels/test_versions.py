# SPDX-License-Identifier: Apache-2.0
"""An old Triton is refused by name, before a kernel of it is imported."""

import importlib.metadata
import importlib.util
import sys
from types import SimpleNamespace

import pytest
import torch
from mla_kernels import dispatch, mla_layer
from mla_kernels.decode.choice import choose_decode_impl
from mla_kernels.indexer.api import _choose as choose_indexer_impl
from mla_kernels.layer import MlaLayerConfig, rope_table
from mla_kernels.query.api import join_query
from mla_kernels.sparse.choice import choose_sparse_impl
from mla_kernels.testing.naive_layer import NaiveMlaLayer
from mla_kernels.versions import no_triton


@pytest.fixture
def installed(monkeypatch):
    """Pretend that these distributions are all there is, by version."""

    def pretend(**found):
        def version(name):
            if name not in found:
                raise importlib.metadata.PackageNotFoundError(name)
            return found[name]

        monkeypatch.setattr(importlib.metadata, "version", version)
        spec = object() if found else None
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
        no_triton.cache_clear()

    yield pretend
    no_triton.cache_clear()


def test_old_triton_is_refused(installed):
    installed(triton="3.5.1")
    assert no_triton() == "it needs triton 3.6 or newer, 3.5.1 is installed"
    with pytest.raises(ValueError, match=r"impl='triton' of op cannot run here.*3\.5\.1 is"):
        dispatch.choose_impl(
            "op", "triton", torch.device("cpu"), available=("triton", "torch", "reference")
        )


@pytest.mark.parametrize(
    "found",
    [{"triton": "3.6.0"}, {"triton": "3.10.0"}, {"pytorch-triton-rocm": "3.7.1"}, {"x": "1"}],
)
def test_others_are_not(installed, found):
    installed(**found)
    assert no_triton() is None


def test_none_at_all(installed):
    installed()
    assert no_triton() == "triton is not installed"


def indexer(impl, device):
    return choose_indexer_impl("indexer_scores", impl, SimpleNamespace(device=device), None, False)


@pytest.mark.parametrize(
    ("choose", "module"),
    [
        (choose_decode_impl, "decode.hopper.support"),
        (choose_sparse_impl, "sparse.hopper.support"),
        (indexer, "indexer.hopper.launcher"),
    ],
)
@pytest.mark.parametrize("found", [{}, {"triton": "3.5.1"}])
def test_a_gpu_without_it_has_torch(installed, monkeypatch, choose, module, found):
    """What a Hopper kernel serves is not asked: of the indexer, that imports Triton."""
    installed(**found)
    monkeypatch.setitem(sys.modules, f"mla_kernels.{module}", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    device = torch.device("cuda", 0)
    for impl in ("torch", "reference"):
        assert choose(impl, device).impl == impl
    chosen = choose("auto", device)
    assert chosen.impl == "torch" and f"hopper: {no_triton()}" in chosen.reason
    for impl in ("hopper", "triton"):
        with pytest.raises(ValueError, match=f"impl='{impl}' of .* cannot run here: {no_triton()}"):
            choose(impl, device)


def test_query_parts_are_joined_without_it(installed, monkeypatch):
    installed()
    monkeypatch.setitem(sys.modules, "mla_kernels.query.triton.launcher", None)
    latent, rope = torch.randn(3, 2, 8), torch.randn(3, 2, 4)
    assert torch.equal(join_query(latent, rope), torch.cat((latent, rope), -1))


class OnGpu(torch.Tensor):
    """Says that it is."""

    is_cuda = True


@pytest.mark.parametrize("found", [{}, {"triton": "3.5.1"}])
def test_a_layer_on_a_gpu_without_it_is_torch(installed, monkeypatch, found):
    config = MlaLayerConfig(
        dim=32, q_lora_rank=24, kv_lora_rank=256, num_heads=2, nope_dim=8, rope_dim=32, v_dim=8
    )
    weights = NaiveMlaLayer(config).requires_grad_(False).absorbed_weights()
    x, table = torch.randn(2, 1, config.dim), rope_table(config, 16)
    block_table, seq_lens = torch.arange(2).view(2, 1).int(), torch.ones(2, dtype=torch.int32)

    def layer(x):
        cache = torch.zeros(2, 16, config.cache.head_dim)
        args = (x, cache, block_table, seq_lens, weights, table)
        return mla_layer(*args, impl="torch"), cache

    want, want_cache = layer(x)
    installed(**found)
    monkeypatch.setitem(sys.modules, "mla_kernels.layer.triton.launcher", None)
    got, cache = layer(x.as_subclass(OnGpu))
    assert torch.equal(got, want) and torch.equal(cache, want_cache) and cache.any()
