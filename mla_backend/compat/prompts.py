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


def expands_prompts_of_sparse_layers() -> bool:
    """Whether `use_dense_mha` of a step's prefill metadata sends prompts of sparse layers through
    `forward_mha`, in the layer and in the CUDA model's own part of it.

    Earlier versions can too: 0.26 compares lengths in the layer, 0.27 and 0.28 ask the metadata
    for more. None of them was run so.
    """
    return not versions.before((0, 29))


def wants_fp8_prompts(layer: Any) -> bool:
    """Whether `layer` takes prompts in fp8 alone if its cache is fp8, and none so if it is
    fp8_ds_mla: vLLM's own of Kimi-Linear and Kimi-K3 on CUDA does, which is no MLAAttention. Seen
    in 0.27 to 0.33; 0.26 has none."""
    return type(layer).__module__.startswith("vllm.models.kimi_k3.")
