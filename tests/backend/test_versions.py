# SPDX-License-Identifier: Apache-2.0
"""The version range, and `compat` against registries shaped like vLLM 0.26's and 0.32's."""

import enum
import importlib
import logging
import sys
import types

import pytest
import torch

from mla_backend import compat, plugin


@pytest.fixture
def vllm_version(monkeypatch):
    def pretend(version):
        monkeypatch.setattr(compat.versions, "installed_vllm_version", lambda: version)

    return pretend


@pytest.mark.parametrize(
    "version, supported",
    [
        ("0.25.1", False),
        ("0.26.0", True),
        ("0.27.1", True),
        ("0.32.0+cpu", True),
        ("0.33.1rc1.dev7+gabc", True),
        ("0.34.0rc1", False),
        ("1.0.0", False),
        ("dev", False),
    ],
)
def test_range(vllm_version, version, supported):
    vllm_version(version)
    status = compat.vllm_version_status()
    assert status.supported is supported
    assert "0.26 to 0.33" in status.message
    assert version in status.message


def test_no_vllm(vllm_version):
    vllm_version(None)
    status = compat.vllm_version_status()
    assert not status.supported
    assert "not installed" in status.message


def test_untested_vllm_may_be_allowed(vllm_version, monkeypatch):
    vllm_version("0.34.0")
    monkeypatch.setenv("MLA_BACKEND_ALLOW_UNTESTED_VLLM", "1")
    assert compat.vllm_version_status().supported


class FakeEnum026(enum.Enum):
    FLASH_ATTN = "vllm.flash"
    CUSTOM = None


class FakeEnum032(enum.Enum):
    FLASH_ATTN = "vllm.flash"
    CUSTOM = None

    @classmethod
    def register(cls, name, value):
        raise AssertionError("a member made so is unknown to a spawned engine")


def fake_registry(monkeypatch, members):
    """vLLM's registry module with `register_backend` as its versions define it."""
    module = types.ModuleType("registry")
    module.AttentionBackendEnum = members
    module.paths = {}

    def register_backend(backend, class_path=None, is_mamba=False):
        module.paths[backend.name] = class_path

    module.register_backend = register_backend
    monkeypatch.setitem(sys.modules, "vllm.v1.attention.backends.registry", module)
    return module


@pytest.mark.parametrize(
    "members, names", [(FakeEnum026, ["CUSTOM"]), (FakeEnum032, ["CUSTOM", "MLA_BACKEND"])]
)
def test_names_by_version(monkeypatch, members, names):
    registry = fake_registry(monkeypatch, members)
    for _ in range(2):
        assert compat.register_attention_backend("a.B", "MLA_BACKEND") == names
    assert registry.paths == {"CUSTOM": "a.B"}
    assert [members[name] for name in names] == [members.CUSTOM] * len(names)


@pytest.mark.parametrize("members, overridden", [(["FLASH_ATTN"], True), (["CPU"], False)])
def test_prefill_backend_only_where_vllm_has_none_for_cpu(monkeypatch, members, overridden):
    module = types.ModuleType("registry")
    module.MLAPrefillBackendEnum = enum.Enum("MLAPrefillBackendEnum", members)
    calls = []
    module.register_mla_prefill_backend = lambda *args: calls.append(args)
    package = types.ModuleType("prefill")
    package.registry = module
    monkeypatch.setitem(sys.modules, "vllm.v1.attention.backends.mla.prefill", package)
    compat.register_cpu_prefill_backend("a.B")
    assert bool(calls) is overridden


@pytest.mark.parametrize("version, kept", [("0.26.0", True), ("0.28.0", True), ("0.29.0", False)])
def test_kv_b_weight_is_kept_before_029(vllm_version, version, kept):
    import torch
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    vllm_version(version)
    layer = torch.nn.Linear(4, 8, bias=False)
    layer.quant_method = method = UnquantizedLinearMethod()
    compat.keep_kv_b_weight(layer)
    assert (layer.quant_method is not method) is kept
    if kept:
        weight = layer.weight
        layer.quant_method.process_weights_after_loading(layer)
        assert layer.weight is weight
        x = torch.randn(2, 4)
        torch.testing.assert_close(layer.quant_method.apply(layer, x), x @ weight.T)


@pytest.mark.parametrize(
    "version, skipped", [("0.26.0", True), ("0.27.1", True), ("0.28.0", False)]
)
def test_chunked_context_is_not_described_before_028(vllm_version, monkeypatch, version, skipped):
    from vllm.model_executor.layers.attention import mla_attention

    vllm_version(version)
    described = object()
    monkeypatch.setattr(mla_attention, "build_mla_chunked_context_metadata", lambda **_: described)
    compat.skip_chunked_context_metadata()
    answer = mla_attention.build_mla_chunked_context_metadata(context_lens_cpu=None)
    assert answer is (None if skipped else described)


def test_a_quantised_kv_b_is_left_alone(vllm_version):
    import torch
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    class Quantised(UnquantizedLinearMethod):
        """Of a quantisation that keeps its weight in a form of its own."""

    vllm_version("0.26.0")
    layer = torch.nn.Linear(4, 8, bias=False)
    layer.quant_method = method = Quantised()
    compat.keep_kv_b_weight(layer)
    assert layer.quant_method is method


@pytest.mark.parametrize("version", ["0.26.0", "0.32.0"])
def test_a_kv_b_of_int8_can_be_split(vllm_version, version):
    """vLLM's operator for CPUs without AMX tiles leaves None as the layer's weight."""
    import torch
    from vllm.model_executor.layers.quantization.utils import quant_utils

    packed = torch.arange(32.0).view(8, 4)

    class Int8:
        def process_weights_after_loading(self, layer):
            layer.weight = None

        def apply(self, layer, x, bias=None):
            return x @ packed.T

    vllm_version(version)
    layer = torch.nn.Linear(4, 8, bias=False)
    layer.quant_method, layer.input_size_per_partition = Int8(), 4
    compat.keep_kv_b_weight(layer)
    layer.quant_method.process_weights_after_loading(layer)
    assert torch.equal(quant_utils.get_and_maybe_dequant_weights(layer), packed)


@pytest.mark.parametrize(
    "max_model_len, block_size, ranks, expected",
    [
        (100, 64, 1, 2),
        (4096, 64, 1, 64),
        (4097, 64, 1, 66),  # of 128 tokens at least, in every version
        (4000, 64, 1, 64),
        (1100, 128, 1, 18),
        (1100, 256, 1, 20),  # 5 blocks of vLLM's own
        (1100, 192, 1, 18),
        (1100, 2112, 1, 66),  # a hybrid model's
        (100, None, 1, 2),
        (4096, 64, 2, 32),
        (4097, 64, 4, 18),  # a block is 256 tokens, 64 of each rank
    ],
)
def test_block_tables_are_as_wide_as_those_of_vllm(max_model_len, block_size, ranks, expected):
    """Kernels of another width would compile in a step."""
    from vllm.v1.worker import block_table

    config = types.SimpleNamespace(
        model_config=types.SimpleNamespace(max_model_len=max_model_len),
        cache_config=types.SimpleNamespace(block_size=block_size),
        parallel_config=types.SimpleNamespace(decode_context_parallel_size=ranks),
    )
    assert compat.block_table_width(config, 64) == expected
    theirs = getattr(block_table, "get_block_table_width", None)  # not in 0.26
    if theirs is not None:
        own = block_size or 64
        assert theirs(-(-max_model_len // (own * ranks)), own) * own // 64 == expected


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_block_tables_of_sparse_layers_are_as_wide_as_those_of_vllm(ranks, monkeypatch):
    """Their group has pages of two sizes: the latent rows and the indexer's keys."""
    from vllm.v1 import kv_cache_interface as interface

    config = types.SimpleNamespace(
        model_config=types.SimpleNamespace(max_model_len=4000),
        cache_config=types.SimpleNamespace(block_size=64),
        parallel_config=types.SimpleNamespace(
            decode_context_parallel_size=ranks, prefill_context_parallel_size=1
        ),
        use_v2_model_runner=False,
    )
    rows = {"latent": (576, torch.bfloat16), "keys": (132, torch.uint8)}
    group = interface.UniformTypeKVCacheSpecs.from_specs(
        {
            name: interface.MLAAttentionSpec(
                block_size=64, num_kv_heads=1, head_size=width, dtype=dtype
            )
            for name, (width, dtype) in rows.items()
        }
    )

    def theirs():
        return -(-group.max_num_blocks_per_req(config, 4000) // 2) * 2

    assert compat.block_table_width(config, 64, sparse=True) == theirs()
    if "max_num_blocks_per_req" in vars(interface.UniformTypeKVCacheSpecs):  # not in 0.26
        monkeypatch.delattr(interface.UniformTypeKVCacheSpecs, "max_num_blocks_per_req")
    assert compat.block_table_width(config, 64, sparse=True) == theirs() == 64
    assert compat.block_table_width(config, 64) == {1: 64, 2: 32, 4: 16}[ranks]
    config.use_v2_model_runner = True  # which narrows them in 0.26, too
    assert compat.block_table_width(config, 64, sparse=True) == {1: 64, 2: 32, 4: 16}[ranks]


@pytest.mark.parametrize(
    "version, second, within",
    [
        ("0.26.0", True, True),
        ("0.28.1", True, True),
        ("0.28.1", False, False),
        ("0.29.0", True, False),
        ("0.29.0", False, False),
    ],
)
def test_how_ranks_are_dealt_tokens(vllm_version, version, second, within):
    vllm_version(version)
    config = types.SimpleNamespace(use_v2_model_runner=second)
    assert compat.deals_within_64(config) is within
    assert compat.forgets_lengths_of_ranks(config) is second
    vllm_version("0.30.0")
    assert not compat.forgets_lengths_of_ranks(config)


def test_placeholder_can_be_made_and_is_no_prefill():
    name = plugin.CPU_PREFILL_CLASS.rpartition(".")
    placeholder = getattr(importlib.import_module(name[0]), name[2])
    dims = {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    made = placeholder(num_heads=1, scale=1.0, kv_lora_rank=512, vllm_config=None, **dims).clone()
    with pytest.raises(RuntimeError, match="forward_mha"):
        made.run_prefill_new_tokens()


def test_outside_the_range_selecting_fails_with_the_range(vllm_version, monkeypatch, caplog):
    vllm_version("0.34.0")
    registry = fake_registry(monkeypatch, FakeEnum032)
    with caplog.at_level(logging.ERROR, logger="vllm.mla_backend"):
        monkeypatch.setattr(plugin.logger, "propagate", True)
        plugin.register()
    assert "0.26 to 0.33; vLLM 0.34.0 is installed" in caplog.text
    module = registry.paths["CUSTOM"].rpartition(".")[0]
    sys.modules.pop(module, None)
    with pytest.raises(RuntimeError, match=r"0\.26 to 0\.33; vLLM 0\.34\.0 is installed"):
        importlib.import_module(module)


@pytest.mark.parametrize("version", ["0.12.0", "0.34.0"])
@pytest.mark.parametrize("registry", [None, types.ModuleType("registry")])  # not there, or another
def test_outside_the_range_vllm_starts_without_our_registry(
    vllm_version, monkeypatch, caplog, registry, version
):
    """vLLM calls plugins with nothing around them: an error here ends it for every model."""
    vllm_version(version)
    monkeypatch.setitem(sys.modules, "vllm.v1.attention.backends.registry", registry)
    monkeypatch.setattr(plugin.logger, "propagate", True)
    plugin.register()
    assert f"vLLM {version} is installed" in caplog.text
    monkeypatch.setenv("MLA_BACKEND_ALLOW_UNTESTED_VLLM", "maybe")
    plugin.register()
    assert "MLA_BACKEND_ALLOW_UNTESTED_VLLM='maybe': expected one of" in caplog.text


def test_below_the_range_the_cpu_platform_is_vllms_own(monkeypatch):
    """There the arguments are others, a configuration has no attention_config, and the enum's
    members no get_path."""
    from vllm.platforms.cpu import CpuPlatform

    from mla_backend.platform import MlaCpuPlatform

    seen = []
    stock = classmethod(lambda cls, *args, **kwargs: seen.append((args, kwargs)))
    monkeypatch.setattr(CpuPlatform, "get_attn_backend_cls", stock)
    monkeypatch.setattr(CpuPlatform, "check_and_update_config", stock)
    member = enum.Enum("_Backend", ["TORCH_SDPA"]).TORCH_SDPA
    for selected in (None, member):
        MlaCpuPlatform.get_attn_backend_cls(selected, 64, torch.bfloat16, use_mla=False)
    config = types.SimpleNamespace(
        model_config=object(), parallel_config=types.SimpleNamespace(worker_cls="auto")
    )
    MlaCpuPlatform.check_and_update_config(config)
    assert seen == [
        ((None, 64, torch.bfloat16), {"use_mla": False}),
        ((member, 64, torch.bfloat16), {"use_mla": False}),
        ((config,), {}),
    ]
