# SPDX-License-Identifier: Apache-2.0
"""What cannot be served is refused at start-up, with the value, what is allowed and the mend."""

import json
import os
import types

import pytest
from layer_config import selector_config


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
    from mla_backend import compat

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
    theirs = start_up(tmp_path, attention_backend=None).cache_config.block_size
    # vLLM's own: before 0.30 it has no CPU backend of V4, and takes what other models have.
    assert theirs in ((16, 128) if compat.versions.before((0, 30)) else (256,))


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
    said = r"mla-backend cannot serve decode context parallelism of 2 ranks on a CPU\. Mend: --dec"
    with pytest.raises(ValueError, match=said):
        start_up(demo_checkpoint("v3"), tensor_parallel_size=2, decode_context_parallel_size=2)


def test_drafts_with_pipeline_parallelism(start_up, demo_checkpoint):
    """vLLM would end with a Python error, or compute wrong tokens."""
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}
    said = r"cannot serve 3 speculative tokens with pipeline parallelism of 2 stages on .*Mend: --p"
    with pytest.raises(ValueError, match=said):
        start_up(demo_checkpoint("v3"), pipeline_parallel_size=2, speculative_config=drafts)


def test_batch_invariant_mode_before_any_layer_is_there(start_up, demo_checkpoint, monkeypatch):
    """vLLM would load the model, and fail in the experts or in the first step."""
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    said = r"mla-backend cannot serve batch-invariant mode on a CPU, .*Mend: unset VLLM_BATC"
    with pytest.raises(ValueError, match=said):
        start_up(demo_checkpoint("v3"))


def test_adapters_beside_experts(start_up, demo_checkpoint):
    """vLLM would start, and die in the first step, whatever layers the adapters change."""
    said = r"cannot serve LoRA adapters beside the experts of DeepseekV3\w+ on a CPU, .*Mend: leave"
    with pytest.raises(ValueError, match=said):
        start_up(demo_checkpoint("v3"), enable_lora=True, lora_target_modules=["q_b_proj"])
    dense = {"first_k_dense_replace": 99, "n_routed_experts": 0}
    assert start_up(demo_checkpoint("v3"), enable_lora=True, hf_overrides=dense).lora_config


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
