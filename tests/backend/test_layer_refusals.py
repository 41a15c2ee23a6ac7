# SPDX-License-Identifier: Apache-2.0
"""Layers, GPUs and implementations that are refused, with the reason and the mend."""

import ast
import inspect
import re
import textwrap
import types
from pathlib import Path

import pytest
import torch
from layer_config import selector_config

REFUSED = [
    ({"head_size": 512}, r"512 elements; the kernels take 576 \(512 \+ 64\) or 320"),
    ({"dtype": torch.float64}, r"model dtype float64; supported: float16, bfloat16, float32"),
    # auto would be no mend: such a name is as often the checkpoint's.
    ({"kv_cache_dtype": "nvfp4"}, r"nvfp4; supported: auto.* Mend: --kv-cache-dtype bfloat16"),
    (
        {"kv_cache_dtype": "fp8_e5m2", "dtype": torch.float32},
        r"fp8_e5m2; supported: auto.* Mend: --kv-cache-dtype fp8 ",
    ),
    ({"kv_cache_dtype": "float16"}, r"float16 with model dtype bfloat16; they must agree"),
    ({"block_size": 16}, r"block size 16 is not a multiple of 64"),
    ({"use_mla": False}, r"does not use multi-head latent attention"),
    (
        {"use_sparse": True, "head_size": 320},
        r"320 elements; the kernels take 576 \(512 \+ 64\)\. ",
    ),
    ({"use_sparse": True, "kv_cache_dtype": "fp8_e5m2"}, r"fp8_e5m2; supported: auto"),
    (
        {"use_sparse": True, "use_dcp": True},
        r"cannot serve this: decode context parallelism on a CPU\. "
        r"Mend: --decode-context-parallel-size 1",
    ),
    ({"use_dcp": True}, r"cannot serve this: decode context parallelism on a CPU"),
    ({"use_batch_invariant": True}, r"mode on a CPU, .*Mend: unset VLLM_BATCH_INVARIANT"),
    ({"has_sliding_window": True}, r"a sliding window\. Mend"),
    ({"has_sink": True}, r"attention sinks\. Mend"),
    ({"use_mm_prefix": True}, r"image tokens of a prompt\. Mend"),
    ({"use_per_head_quant_scales": True}, r"one scale\. Mend: --kv-cache-dtype auto"),
    ({"use_non_causal": True}, r"draft models.*Mend: another speculative method"),
    ({"use_pcp": True}, r"Mend: --prefill-context-parallel-size 1"),
    ({"use_adaptive_verification": True}, r"adaptive verification off"),
    ({"use_rswa": True}, r"R-SWA\)\. Mend"),
    ({"attn_type": "encoder_only"}, r"attention type encoder_only; supported: decoder\. Mend"),
]


@pytest.mark.parametrize("changes, reason", REFUSED)
def test_layer_is_refused_with_the_reason(changes, reason):
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from mla_backend.plugin import register

    register()
    with pytest.raises(ValueError, match=reason):
        current_platform.get_attn_backend_cls(
            AttentionBackendEnum.CUSTOM, selector_config(**changes)
        )


@pytest.mark.parametrize("changes", [{}, {"kv_cache_dtype": "fp8_ds_mla"}, {"block_size": 128}])
def test_sparse_layer_gets_the_sparse_class(changes):
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from mla_backend.plugin import BACKEND_CLASS, SPARSE_BACKEND_CLASS, register

    register()
    for sparse, path in ((True, SPARSE_BACKEND_CLASS), (False, BACKEND_CLASS)):
        layer = selector_config(use_sparse=sparse, **changes)
        assert current_platform.get_attn_backend_cls(AttentionBackendEnum.CUSTOM, layer) == path


@pytest.mark.parametrize(
    "changes",
    [{}, {"head_size": 320}, {"dtype": torch.float32}, {"block_size": 128}, {"block_size": None}],
)
def test_layer_is_accepted(changes):
    from mla_backend.attention.backend import MlaBackend

    reasons = MlaBackend.validate_configuration(
        device_capability=None, **selector_config(**changes)._asdict()
    )
    assert reasons == []


@pytest.mark.parametrize("capability", [(7, 5), (11, 0), (13, 0)])
def test_a_gpu_that_no_kernel_is_made_for(capability, monkeypatch):
    from vllm.platforms.interface import DeviceCapability

    from mla_backend.attention.backend import MlaBackend

    asked = {"device_capability": DeviceCapability(*capability), **selector_config()._asdict()}
    (reason,) = MlaBackend.validate_configuration(**asked)
    shown = ".".join(map(str, capability))
    assert f"{shown}; the kernels are made for 8.x, 9.x, 10.x and 12.x. Mend" in reason
    monkeypatch.setenv("MLA_BACKEND_IMPL", "torch")
    assert MlaBackend.validate_configuration(**asked) == []


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (9, 0)])
@pytest.mark.parametrize("needs_fp8", [True, False])
def test_sparse_layers_where_triton_has_no_fp8_type(capability, needs_fp8, monkeypatch):
    """vLLM's own part of the indexer would fail to compile in the first step."""
    from vllm.platforms.interface import DeviceCapability

    from mla_backend import compat
    from mla_backend.attention.backend import MlaBackend
    from mla_backend.attention.sparse.backend import SparseMlaBackend

    monkeypatch.setattr(compat, "indexer_needs_fp8_type", lambda: needs_fp8)
    gpu = {"device_capability": DeviceCapability(*capability)}
    layer = gpu | selector_config(dtype=torch.bfloat16)._asdict()
    assert MlaBackend.validate_configuration(**layer) == []
    reasons = SparseMlaBackend.validate_configuration(**layer | {"use_sparse": True})
    if needs_fp8 and capability < (8, 9):
        shown = ".".join(map(str, capability))
        assert f"sparse attention on compute capability {shown}" in reasons[0]
        assert "Mend: vLLM 0.28" in reasons[0]
    else:
        assert reasons == []


@pytest.mark.parametrize("version, needs", [((0, 26), False), ((0, 28), False), ((0, 29), True)])
def test_which_vllm_needs_the_fp8_type(version, needs, monkeypatch):
    from mla_backend import compat

    monkeypatch.setattr(compat.versions, "before", lambda limit: version < limit)
    assert compat.indexer_needs_fp8_type() is needs


@pytest.mark.parametrize("capability, fused", [(80, False), (86, False), (89, True), (90, True)])
def test_the_fused_queries_of_an_indexer_below_sm_89(capability, fused, monkeypatch):
    import vllm.platforms
    from vllm.model_executor.models import deepseek_v2  # noqa: F401  # before the platform changes

    from mla_backend import compat

    indexer = types.SimpleNamespace(
        indexer_op=types.SimpleNamespace(),
        k_cache=types.SimpleNamespace(),
        use_fused_indexer_q=True,
    )
    gpu = types.SimpleNamespace(
        is_cpu=lambda: False, has_device_capability=lambda least: capability >= least
    )
    monkeypatch.setattr(vllm.platforms, "current_platform", gpu)
    compat.replace_indexer(indexer, print, object, print)
    assert indexer.use_fused_indexer_q is fused
    assert indexer.indexer_op._forward_method is print


def test_the_gpus_are_those_of_the_kernels():
    from mla_kernels.arch import ARCHS

    from mla_backend.attention import support

    assert support.COMPUTE_GENERATIONS == tuple(sorted({sm // 10 for sm in ARCHS}))


def test_an_implementation_that_cannot_run_here(monkeypatch):
    from mla_kernels.decode.choice import choose_decode_impl
    from mla_kernels.dispatch import Choice
    from mla_kernels.layouts import MlaDims

    from mla_backend.attention.choice import choose

    case = {"dims": MlaDims(), "dtype": torch.bfloat16, "kv_cache_dtype": torch.bfloat16}
    monkeypatch.setenv("MLA_BACKEND_IMPL", "hopper")
    says = r"MLA_BACKEND_IMPL=hopper: .* needs an sm_90 GPU.* Mend: unset MLA_BACKEND_IMPL"
    with pytest.raises(ValueError, match=says):
        choose(choose_decode_impl, torch.device("cpu"), block_size=64, rescale="pow2", **case)
    # Torch on a GPU, which nobody asked for.
    monkeypatch.setenv("MLA_BACKEND_IMPL", "auto")

    def fail(*_):
        raise ValueError("Expected a rescale")

    with pytest.raises(ValueError, match=r"^Expected a rescale$"):
        choose(fail, torch.device("cpu"))
    fallback = Choice("torch", "no kernel fits on cuda; triton: it is not installed")
    with pytest.raises(ValueError, match=r"no kernel serves .*not installed\)\. Mend"):
        choose(lambda *_: fallback, torch.device("cuda:0"))
    assert choose(lambda *_: fallback, torch.device("cpu")) == fallback
    monkeypatch.setenv("MLA_BACKEND_IMPL", "torch")
    assert choose(lambda *_: fallback, torch.device("cuda:0")) == fallback


def test_every_refusal_of_the_backend_names_its_mend():
    """ValueErrors under mla_backend/attention that an operator may see at start-up."""
    from mla_backend import attention

    inner = ("step_check.py", "extends.py", "rows.py")  # faults of a step, not of a set-up
    missing = []
    for path in sorted(Path(attention.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Raise) and path.name not in inner and node.exc is not None:
                text = ast.unparse(node)
                raised = ("raise ValueError", "raise RefusalError", "raise cannot_serve")
                if text.startswith(raised) and not re.search(r"Mend|ELSE|_reason\(", text):
                    missing.append(f"{path.name}:{node.lineno}: {text[:80]}")
    assert missing == []


def reasons_of_vllm():
    """Every reason that this vLLM's own validate_configuration can give, from its source."""
    from vllm.v1.attention.backend import AttentionBackend

    tree = ast.parse(textwrap.dedent(inspect.getsource(AttentionBackend.validate_configuration)))
    appended = [
        node.args[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "append"
    ]
    return [node.value for node in appended if isinstance(node, ast.Constant)]


def test_every_reason_of_vllm_has_our_words_and_a_mend():
    from mla_backend import compat
    from mla_backend.attention import layer_reasons

    reasons = reasons_of_vllm()
    known = {(0, 26): 17, (0, 27): 17, (0, 28): 18, (0, 29): 19}
    version = compat.parse_version(compat.installed_vllm_version())
    assert len(reasons) >= known.get(version, 21)
    config = selector_config()._asdict() | {"device_capability": (7, 5)}
    for reason in reasons:
        (words,) = layer_reasons.explain([reason], config)
        assert words != reason and "Mend: " in words


def test_an_implementation_and_a_rescale_that_do_not_go_together(monkeypatch):
    """Both settings are named, but not where the implementation could not run with another."""
    from mla_kernels.decode.hopper.support import refusal
    from mla_kernels.dispatch import Choice
    from mla_kernels.layouts import MlaDims

    from mla_backend.attention.choice import choose

    def on_hopper(impl, device, *, rescale):
        if reason := refusal(MlaDims(), torch.bfloat16, torch.bfloat16, 64, rescale):
            raise ValueError(reason)
        return Choice(impl, "asked for by name")

    def elsewhere(impl, device, *, rescale):
        raise ValueError("it needs an sm_90 GPU")

    gpu = torch.device("cuda:0")
    monkeypatch.setenv("MLA_BACKEND_IMPL", "hopper")
    monkeypatch.setenv("MLA_BACKEND_RESCALE", "flash")
    says = r"^MLA_BACKEND_IMPL=hopper with MLA_BACKEND_RESCALE=flash: it rescales by .*'flash'\. "
    with pytest.raises(ValueError, match=says + "Mend: unset MLA_BACKEND_IMPL or MLA_BACKEND_RESC"):
        choose(on_hopper, gpu, rescale="flash")
    with pytest.raises(ValueError, match=r"=hopper: it needs.*Mend: unset MLA_BACKEND_IMPL$"):
        choose(elsewhere, gpu, rescale="flash")
    monkeypatch.setenv("MLA_BACKEND_RESCALE", "amla")
    assert choose(on_hopper, gpu, rescale="amla").impl == "hopper"


@pytest.mark.parametrize("asked", ["auto", "0", "32"])
def test_ends_of_prompts_of_a_sparse_layer(asked, monkeypatch):
    """They attend as its rows do, or expanded, however many tokens the setting names."""
    from mla_backend.attention.backend import MlaBackend
    from mla_backend.attention.sparse.backend import SparseMlaBackend

    monkeypatch.setenv("MLA_BACKEND_EXTEND_TOKENS", asked)
    layer = {"device_capability": None, **selector_config()._asdict()}
    assert MlaBackend.validate_configuration(**layer) == []
    reasons = SparseMlaBackend.validate_configuration(**layer | {"use_sparse": True})
    if asked == "auto":
        assert reasons == []
    else:
        (reason,) = reasons
        assert reason.startswith(f"MLA_BACKEND_EXTEND_TOKENS={asked} needs dense attention, not")
        assert reason.endswith(
            "MLA_BACKEND_EXPAND_PROMPTS is for. Mend: unset MLA_BACKEND_EXTEND_TOKENS"
        )
