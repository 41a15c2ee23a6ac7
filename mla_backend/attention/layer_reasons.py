# SPDX-License-Identifier: Apache-2.0
"""Why a layer is refused: the reasons of vLLM's `validate_configuration`, and those of combinations
that it does not know, as sentences that name the value, what is allowed and the mend. Imports
neither vLLM nor torch."""

from collections.abc import Callable
from typing import Any

from mla_backend import compat, envs
from mla_backend.attention import fp8_query
from mla_backend.attention.support import (
    COMPUTE_GENERATIONS,
    DTYPES,
    ELSE,
    FP8_TYPE,
    GPU_DTYPES,
    HEAD_SIZES,
    SLOW_IMPLS,
    SPARSE_HEAD_SIZES,
    batch_invariance_on_cpu_reason,
    block_size_reason,
    compute_generations,
    dcp_on_cpu_reason,
    dcp_reason,
    dtype_name,
    kv_cache_dtype_reason,
    not_mla_reason,
)

_WORDS: dict[str, Callable[[dict[str, Any]], str]] = {
    "head_size not supported": lambda c: (
        f"cache row of {c['head_size']} elements; the kernels take "
        + " or ".join(f"{size} ({HEAD_SIZES[size]})" for size in _head_sizes(c["use_sparse"]))
        + f". {ELSE}"
    ),
    "dtype not supported": lambda c: (
        f"model dtype {dtype_name(c['dtype'])}; supported: {', '.join(DTYPES)}. "
        "Mend: --dtype bfloat16"
    ),
    "kv_cache_dtype not supported": lambda c: kv_cache_dtype_reason(
        c["kv_cache_dtype"], c["dtype"]
    ),
    "block_size not supported": lambda c: block_size_reason(c["block_size"]),
    "non-MLA not supported": lambda c: not_mla_reason(),
    "MLA not supported": lambda c: f"multi-head latent attention (MLA). {ELSE}",
    "sparse not supported": lambda c: (
        "the model uses sparse attention (DeepSeek Sparse Attention); this backend computes "
        f"dense MLA. {ELSE}"
    ),
    "non-sparse not supported": lambda c: (
        f"the layer is dense; this class computes DeepSeek Sparse Attention. {ELSE}"
    ),
    "compute capability not supported": lambda c: (
        f"compute capability {'.'.join(map(str, c['device_capability']))}; "
        f"the kernels are made for {compute_generations()}. {ELSE}"
    ),
    "DCP not supported": lambda c: dcp_reason(),
    "PCP not supported": lambda c: (
        "prefill context parallelism. Mend: --prefill-context-parallel-size 1"
    ),
    "batch invariance not supported": lambda c: (
        "batch-invariant mode. Mend: unset VLLM_BATCH_INVARIANT"
    ),
    "KV connector not supported": lambda c: "KV connectors. Mend: leave out --kv-transfer-config",
    "non-causal attention not supported": lambda c: (
        "non-causal attention, as some draft models ask for. Mend: another speculative method"
    ),
    "non-causal MLA attention with DCP not supported": lambda c: (
        "non-causal attention with decode context parallelism. "
        "Mend: --decode-context-parallel-size 1"
    ),
    "device-cpu query lens mismatch not supported, this is needed for adaptive verification": (
        lambda c: (
            "query lengths that only the GPU knows. Mend: switch adaptive verification off in "
            "--speculative-config"
        )
    ),
    "per-head quant scales not supported": lambda c: (
        "KV cache scales of single heads; a latent cache has one scale. Mend: --kv-cache-dtype auto"
    ),
    "sliding window not supported": lambda c: f"a sliding window. {ELSE}",
    "R-SWA not supported": lambda c: f"reference sliding window attention (R-SWA). {ELSE}",
    "attention sinks not supported": lambda c: f"attention sinks. {ELSE}",
    "partial multimodal token full attention not supported": lambda c: (
        f"full attention among the image tokens of a prompt. {ELSE}"
    ),
}


def explain(reasons: list[str], config: dict[str, Any]) -> list[str]:
    """vLLM's `reasons` in this project's words; a reason without any stays as vLLM put it."""
    return [_words(reason, config) for reason in reasons]


def _words(reason: str, config: dict[str, Any]) -> str:
    if reason in _WORDS:
        return _WORDS[reason](config)
    if reason.startswith("attention type "):
        return f"attention type {config['attn_type']}; supported: decoder. {ELSE}"
    return reason


def combination_reasons(config: dict[str, Any]) -> list[str]:
    """What is supported one by one but not together."""
    kv_cache_dtype, dtype = config["kv_cache_dtype"], dtype_name(config["dtype"])
    reasons = []
    if config["use_sparse"] and (most := envs.get("MLA_BACKEND_EXTEND_TOKENS")) is not None:
        reasons.append(
            f"MLA_BACKEND_EXTEND_TOKENS={most} needs dense attention, not DeepSeek Sparse "
            "Attention, whose prompts MLA_BACKEND_EXPAND_PROMPTS is for. "
            "Mend: unset MLA_BACKEND_EXTEND_TOKENS"
        )
    if config["device_capability"] is None and config.get("use_dcp"):
        reasons.append(dcp_on_cpu_reason())
    if config["device_capability"] is None and config.get("use_batch_invariant"):
        reasons.append(batch_invariance_on_cpu_reason())
    if config["device_capability"] is not None:
        reasons += _gpu_reasons(dtype, config["use_sparse"], config["device_capability"])
        if compat.on_amd_gpu():
            reasons += _amd_reasons(kv_cache_dtype, config["use_sparse"])
    if kv_cache_dtype in ("float16", "bfloat16") and kv_cache_dtype != dtype:
        reasons.append(
            f"KV cache dtype {kv_cache_dtype} with model dtype {dtype}; they must agree. "
            "Mend: --kv-cache-dtype auto"
        )
    if kv_cache_dtype == "fp8_ds_mla" and config["head_size"] != 576:
        reasons.append(
            f"KV cache dtype fp8_ds_mla with a cache row of {config['head_size']} elements; its "
            "layout is for 576. Mend: --kv-cache-dtype fp8"
        )
    return reasons


def _gpu_reasons(dtype: str, sparse: bool, capability: tuple[int, int]) -> list[str]:
    # Of dense layers torch would compute decode tokens alone: prompts are vLLM's, which has no
    # prefill backend for other dtypes.
    by_torch = sparse and envs.get("MLA_BACKEND_IMPL") in SLOW_IMPLS
    reasons = []
    if dtype in DTYPES and dtype not in GPU_DTYPES and not by_torch:
        slow = ", or MLA_BACKEND_IMPL=torch, which is slow" if sparse else ""
        reasons.append(
            f"model dtype {dtype} on a GPU, whose kernels take {' and '.join(GPU_DTYPES)}. "
            f"Mend: --dtype bfloat16{slow}"
        )
    old = capability[0] in COMPUTE_GENERATIONS and tuple(capability) < FP8_TYPE
    if sparse and old and compat.indexer_needs_fp8_type():
        reasons.append(
            f"sparse attention on compute capability {'.'.join(map(str, capability))}, for which "
            "vLLM 0.29 and later cannot compile their own part of the indexer. Mend: vLLM 0.28"
        )
    return reasons


def _amd_reasons(kv_cache_dtype: str, sparse: bool) -> list[str]:
    """No engine has run on one. What is known to differ is refused."""
    reasons = []
    if fp8_query.asked():  # gfx90a calls itself 9.0
        reasons.append(f"{fp8_query.VARIABLE}=1 on an AMD GPU. Mend: {fp8_query.MEND}")
    if sparse:
        reasons.append(
            "DeepSeek Sparse Attention on an AMD GPU, where vLLM's own part of the indexer is "
            f"another. {ELSE}"
        )
    if str(kv_cache_dtype).startswith("fp8") and compat.fp8_is_fnuz():
        reasons.append(
            f"KV cache dtype {kv_cache_dtype} on this AMD GPU, where vLLM's fp8 is e4m3fnuz; the "
            "kernels read e4m3fn. Mend: --kv-cache-dtype bfloat16"
        )
    return reasons


def _head_sizes(sparse: bool) -> tuple[int, ...]:
    return SPARSE_HEAD_SIZES if sparse else tuple(HEAD_SIZES)
