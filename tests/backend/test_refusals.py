# SPDX-License-Identifier: Apache-2.0
"""What cannot be served is refused at start-up, with the value, what is allowed and the mend."""

import ast
import inspect
import json
import os
import re
import subprocess
import sys
import textwrap
import types
from pathlib import Path

import pytest
import torch


@pytest.fixture
def start_up():
    """`start_up(model, **engine arguments)` -> VllmConfig; vLLM's changes of os.environ undone."""
    from vllm.engine.arg_utils import EngineArgs

    before = dict(os.environ)

    def create(model, **kwargs):
        args = {"attention_backend": "CUSTOM", "max_model_len": 256, "enforce_eager": True}
        args |= {"skip_tokenizer_init": True, "model": str(model)} | kwargs
        return EngineArgs(**args).create_engine_config()

    yield create
    os.environ.clear()
    os.environ.update(before)


def test_model_without_mla(start_up, llama):
    with pytest.raises(ValueError, match=r"LlamaForCausalLM does not use multi-head latent.*Mend"):
        start_up(llama)


def test_a_model_whose_attention_is_its_own(start_up, tmp_path):
    """vLLM counts DeepSeek-V4 as MLA, but asks nobody for its layers' class, whose pages have 256
    tokens: with ours it would start on pages of 64."""
    config = {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        "hidden_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 16,
        "head_dim": 512,
        "vocab_size": 2048,
        "compress_ratios": [0, 4],
        "torch_dtype": "bfloat16",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"DeepseekV4ForCausalLM does not use .* \(MLA\).*Mend"):
        start_up(tmp_path)
    assert start_up(tmp_path, attention_backend=None).cache_config.block_size == 256


@pytest.mark.parametrize("triton", [False, True])
def test_a_hybrid_whose_linear_attention_has_no_kernels(start_up, tmp_path, monkeypatch, triton):
    """vLLM would fail on an import of Kimi-Linear's, and start Ling 2.5, for its first request."""
    import vllm.triton_utils

    config = {
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        "hidden_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "mla_use_nope": True,
        "vocab_size": 2048,
        "linear_attn_config": {
            "kda_layers": [1],
            "full_attn_layers": [2],
            "num_heads": 4,
            "head_dim": 64,
            "short_conv_kernel_size": 4,
        },
        "torch_dtype": "bfloat16",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr(vllm.triton_utils, "HAS_TRITON", triton)
    if triton:
        assert start_up(tmp_path).model_config.is_hybrid
        return
    said = r"mla-backend cannot serve KimiLinearForCausalLM on a CPU: .* Triton.*Mend: a GPU"
    with pytest.raises(ValueError, match=said):
        start_up(tmp_path)


def test_deepseek_v4_by_the_config_of_transformers():
    """vLLM 0.33 has no class of its own for it, and transformers' renames what V4 is told by."""
    modeling = pytest.importorskip("transformers.models.deepseek_v4.configuration_deepseek_v4")
    from mla_backend.attention import support

    config = modeling.DeepseekV4Config(num_hidden_layers=2, compress_ratios=[0, 4])
    assert not hasattr(config, "compress_ratios")
    model = types.SimpleNamespace(use_mla=True, hf_text_config=config)
    assert not support.is_mla_model(model)


@pytest.mark.parametrize("dtype", ["fp8_e5m2", "fp8_inc"])
def test_kv_cache_dtype(start_up, demo_checkpoint, dtype):
    with pytest.raises(ValueError, match=rf"{dtype}; supported: auto, .*Mend: --kv-cache-dtype"):
        start_up(demo_checkpoint("v3"), kv_cache_dtype=dtype)


def test_context_parallelism_before_any_layer_is_there(start_up, demo_checkpoint):
    """vLLM before 0.28 does not ask the class of a layer about it."""
    # Not of V3.2: vLLM would put its own config class into transformers, for later tests too.
    said = r"mla-backend cannot serve decode context parallelism on a CPU\. Mend: --decode"
    with pytest.raises(ValueError, match=said):
        start_up(demo_checkpoint("v3"), tensor_parallel_size=2, decode_context_parallel_size=2)


def test_batch_invariant_mode_before_any_layer_is_there(start_up, demo_checkpoint, monkeypatch):
    """vLLM would load the model, and fail in the experts or in the first step."""
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    said = r"mla-backend cannot serve batch-invariant mode on a CPU, .*Mend: unset VLLM_BATC"
    with pytest.raises(ValueError, match=said):
        start_up(demo_checkpoint("v3"))


def test_fp8_queries_on_a_cpu(monkeypatch):
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from mla_backend.plugin import register

    register()
    monkeypatch.setenv("MLA_BACKEND_FP8_QUERY", "1")
    with pytest.raises(
        ValueError, match=r"FP8_QUERY=1 needs an sm_90 GPU, not a CPU\. Mend: unset"
    ):
        current_platform.get_attn_backend_cls(
            AttentionBackendEnum.CUSTOM, selector_config(kv_cache_dtype="fp8")
        )


@pytest.mark.parametrize("block_size", [16, 48, 96])
def test_block_size(start_up, demo_checkpoint, block_size):
    with pytest.raises(ValueError, match=rf"block size {block_size} .*multiple of 64.*Mend"):
        start_up(demo_checkpoint("v3"), block_size=block_size)


def test_vllm_version(start_up, demo_checkpoint, monkeypatch):
    from mla_backend import compat

    monkeypatch.setattr(compat.versions, "installed_vllm_version", lambda: "0.34.0")
    with pytest.raises(RuntimeError, match=r"0\.26 to 0\.33; vLLM 0\.34\.0 is installed"):
        start_up(demo_checkpoint("v3"))


def test_a_setting_of_the_platform_that_does_not_parse(start_up, demo_checkpoint, monkeypatch):
    monkeypatch.setenv("MLA_BACKEND_CPU_PLATFORM", "nonsense")
    with pytest.raises(ValueError, match=r"MLA_BACKEND_CPU_PLATFORM='nonsense': expected one of"):
        start_up(demo_checkpoint("v3"))
    config = start_up(demo_checkpoint("v3"), attention_backend=None)
    assert config.attention_config.backend is None  # unselected, nothing changes


@pytest.mark.parametrize("block_size", [64, 128])
def test_block_size_asked_for_is_kept(start_up, demo_checkpoint, block_size):
    config = start_up(demo_checkpoint("v3"), block_size=block_size)
    assert config.cache_config.block_size == block_size


@pytest.mark.parametrize("backend, kept", [("CUSTOM", 64), (None, 128)])
def test_vllm_does_not_choose_the_block_size_again(
    start_up, demo_checkpoint, llama, monkeypatch, backend, kept
):
    """0.33 does, once the layers are there: 128 for DeepSeek-V3.2, which has two classes."""
    from vllm.platforms import current_platform
    from vllm.platforms.cpu import CpuPlatform

    def choose(cls, vllm_config):
        vllm_config.cache_config.block_size = 128

    monkeypatch.setattr(CpuPlatform, "update_block_size_for_backend", classmethod(choose))
    model = demo_checkpoint("v3") if backend else llama
    config = start_up(model, attention_backend=backend)
    current_platform.update_block_size_for_backend(config)
    assert config.cache_config.block_size == kept


@pytest.mark.parametrize("block_size", [None, 128])
def test_a_draft_that_is_not_mla_leaves_the_target_as_it_is(start_up, demo_checkpoint, block_size):
    """vLLM makes a second configuration for it, without our backend and with the same caches."""
    from vllm.config.utils import replace

    blocks = {} if block_size is None else {"block_size": block_size}
    draft = {"method": "ngram", "num_speculative_tokens": 2}  # a model of its own needs more
    config = start_up(
        demo_checkpoint("v3"), max_num_batched_tokens=128, speculative_config=draft, **blocks
    )

    def settled():
        cache, scheduler = config.cache_config, config.scheduler_config
        return (
            cache.block_size,
            cache.user_specified_block_size,
            cache.enable_prefix_caching,
            scheduler.enable_chunked_prefill,
            scheduler.max_num_batched_tokens,
        )

    before = settled()
    assert before == (block_size or 64, block_size is not None, True, True, 128)
    replace(config, attention_config=replace(config.attention_config, backend=None))
    assert settled() == before


def selector_config(**changes):
    """vLLM's AttentionSelectorConfig for one MLA layer of DeepSeek-V3, with `changes`."""
    from vllm.v1.attention.selector import AttentionSelectorConfig

    absent = set(changes) - set(AttentionSelectorConfig._fields)
    if absent:
        pytest.skip(f"this vLLM does not ask about {', '.join(absent)}")
    config = AttentionSelectorConfig(
        head_size=576, dtype=torch.bfloat16, kv_cache_dtype="auto", block_size=64, use_mla=True
    )
    return config._replace(**changes)


REFUSED = [
    ({"head_size": 512}, r"512 elements; the kernels take 576 \(512 \+ 64\) or 320"),
    ({"dtype": torch.float64}, r"model dtype float64; supported: float16, bfloat16, float32"),
    ({"kv_cache_dtype": "fp8_e5m2"}, r"fp8_e5m2; supported: auto"),
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
        r"sparse attention with decode context parallelism\. "
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


def test_a_refusal_reaches_the_server_that_listens():
    from mla_backend.attention.backend import MlaBackend
    from mla_backend.refusals import RefusalError, heard

    script = "from mla_backend.refusals import RefusalError as E; E('no, mend it')"
    with heard() as refused:
        assert refused() == ""
        subprocess.run([sys.executable, "-c", script], check=True)  # a worker
        assert refused() == "no, mend it"
        MlaBackend.validate_configuration(
            device_capability=None, **selector_config(head_size=512)._asdict()
        )
        assert refused().startswith("CUSTOM cannot serve this: cache row of 512 elements")
    RefusalError("nobody listens")


def test_a_failed_start_reaches_the_server_that_listens():
    """Of a worker, not of the engine above it, which only says that there was one."""
    from mla_backend.refusals import RefusalError, heard

    script = """if True:
        import logging
        from mla_backend.plugin import register
        def failed(error, words):
            try:
                raise error
            except Exception:
                logging.getLogger("vllm.v1").exception(words)
        register()
        register()
        failed(KeyError("x"), "WorkerProc failed.")
        failed(KeyError("x"), ValueError("an exception for words"))
        failed(OSError("no weights"), "WorkerProc failed to start.")
        failed(RuntimeError("see above"), "EngineCore failed to start.")
    """
    with heard() as refused:
        subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)
        assert refused() == "OSError: no weights"
        RefusalError("no, mend it")
        assert refused() == "no, mend it"
        subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)
        assert refused() == "no, mend it"


def test_a_start_that_fails_without_words_says_where():
    """In a worker, as in the server's own process."""
    from mla_backend.refusals import heard

    script = """if True:
        import logging
        from mla_backend.plugin import register
        register()
        try:
            {fails}
        except Exception:
            logging.getLogger("vllm.v1").exception("WorkerProc failed to start.")
    """
    for fails, said in (
        (
            "exec(compile('raise AssertionError', 'x.py', 'exec'))",
            "AssertionError, in x.py, line 1",
        ),
        ("exec(compile('1 % 0', 'x.py', 'exec'))", "ZeroDivisionError: .*, in x.py, line 1"),
        ("raise OSError('no weights')", "OSError: no weights$"),
    ):
        with heard() as refused:
            command = [sys.executable, "-c", script.format(fails=fails)]
            subprocess.run(command, check=True, capture_output=True)
            assert re.match(said, refused()), refused()


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
    from mla_backend.attention import support

    reasons = reasons_of_vllm()
    known = {(0, 26): 17, (0, 27): 17, (0, 28): 18, (0, 29): 19}
    version = compat.parse_version(compat.installed_vllm_version())
    assert len(reasons) >= known.get(version, 21)
    config = selector_config()._asdict() | {"device_capability": (7, 5)}
    for reason in reasons:
        (words,) = support.explain([reason], config)
        assert words != reason and "Mend: " in words
