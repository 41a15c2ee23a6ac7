# SPDX-License-Identifier: Apache-2.0
"""How prompts get their attention: prefill backends, and the expanded form for sparse layers."""

from typing import Any

from mla_backend.compat import versions


def register_cpu_prefill_backend(class_path: str) -> None:
    """Give MLA layers on CPU a prefill backend object in vLLM 0.26 to 0.28.

    They take FLASH_ATTN's class wherever there is no compute capability and cannot import it on
    a CPU. No MLA of vLLM's own runs on a CPU there (0.28 has a CPU_MLA, which fails at this very
    import), so nothing is displaced. From 0.29 a class for CPUs is taken.
    """
    from vllm.v1.attention.backends.mla.prefill import registry

    if "CPU" not in registry.MLAPrefillBackendEnum.__members__:
        flash_attn = registry.MLAPrefillBackendEnum.FLASH_ATTN
        registry.register_mla_prefill_backend(flash_attn, class_path)


def mla_prefill_backend(vllm_config: Any) -> str | None:
    """vLLM's name of what will attend to prompts in expanded form; None: nothing does for this
    model. ValueError, as from vLLM, if one was asked for that does not."""
    from vllm.v1.attention.backends.mla.prefill import get_mla_prefill_backend

    try:
        name: str = get_mla_prefill_backend(vllm_config).get_name()
    except ValueError:
        if vllm_config.attention_config.mla_prefill_backend is not None:
            raise
        return None
    return name


def expanding_lacks(part: Any) -> str:
    """What a sparse layer of a GPU, or the layer of an indexer, lacks to have prompts expanded, or
    "".

    Up to 0.28 the layers of vLLM's other model of DeepSeek-V3.2 give `forward_mqa` all tokens.
    """
    if versions.before((0, 29)) and type(part).__module__.startswith("vllm.models.deepseek_v32."):
        return "vLLM's own choice of the model: model_class_overrides unset"
    return ""


def outputs_of_chunked_context() -> int:
    """Outputs that vLLM's common path holds at most, of each new token, while it goes through the
    chunks of their context: over the new tokens, a chunk, and all chunks so far. In 0.26 and 0.27 a
    chunk is of all prompts; they keep the last one's while the next is computed, and merge it into
    another."""
    return 5 if versions.before((0, 28)) else 3


def expanded_prompts(**fields: Any) -> Any:
    """vLLM's MLACommonPrefillMetadata of prompts that go through `forward_mha` of a sparse layer.

    A layer of 0.26 sends all there that are no decode tokens of a step, if its metadata says that
    they are no longer than what is read; since 0.27 `use_dense_mha` decides.
    """
    from vllm.model_executor.layers.attention.mla_attention import MLACommonPrefillMetadata

    if versions.before((0, 27)):
        del fields["query_lens_cpu"]
    else:
        fields["use_dense_mha"] = True
    return MLACommonPrefillMetadata(**fields)


def chunked_context(**arguments: Any) -> Any:
    """vLLM's `build_mla_chunked_context_metadata`; 0.26 and 0.27 ask for the number of prompts."""
    from vllm.model_executor.layers.attention import mla_attention

    if versions.before((0, 28)):
        arguments["num_prefills"] = len(arguments["context_lens_cpu"])
    return mla_attention.build_mla_chunked_context_metadata(**arguments)


def wants_fp8_prompts(layer: Any) -> bool:
    """Whether `layer` takes prompts in fp8 alone if its cache is fp8, and none so if it is
    fp8_ds_mla: vLLM's own of Kimi-Linear and Kimi-K3 on CUDA does, which is no MLAAttention. Seen
    in 0.27 to 0.33; 0.26 has none."""
    return type(layer).__module__.startswith("vllm.models.kimi_k3.")
