# SPDX-License-Identifier: Apache-2.0
"""What the dense backend takes, and what both take. Imports neither vLLM nor torch.

`explain(reasons, config)` turns the reasons of vLLM's `validate_configuration` into sentences that
name the value, what is allowed and the mend.
"""

from collections.abc import Callable, Sequence
from typing import Any

from mla_backend import compat, envs
from mla_backend.refusals import RefusalError, cannot_serve

BLOCK_SIZE = 64
DTYPES = ("float16", "bfloat16", "float32")
KV_CACHE_DTYPES = ("auto", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_ds_mla")
# Width of a cache row in elements: kv_lora_rank + qk_rope_head_dim.
HEAD_SIZES = {576: "512 + 64", 320: "256 + 64"}
# Layers with sparse attention; the fp8 rows are those that its kernel was made for.
SPARSE_HEAD_SIZES = (576,)
# The GPU kernels take fewer dtypes than torch, which computes everything that is listed above.
GPU_DTYPES = ("float16", "bfloat16")
# Implementations that run everything everywhere.
SLOW_IMPLS = ("torch", "reference")
GPU_IMPLS = ("hopper", "triton")
COMPUTE_GENERATIONS = (8, 9, 10, 12)  # of compute capabilities: those of mla_kernels.arch
FP8_TYPE = (8, 9)  # the first compute capability for which Triton has e4m3
MAX_QUERY_LEN = 8
MAX_HEADS = 128
# Of DeepSeek-V4's config: in vLLM's class, and in that of transformers, which vLLM 0.33 takes.
_COMPRESSED = ("compress_ratios", "compress_rates")
_NO_DCP = "Mend: --decode-context-parallel-size 1"


def block_size_reason(block_size: int) -> str:
    return (
        f"block size {block_size} is not a multiple of {BLOCK_SIZE}. "
        f"Mend: --block-size {BLOCK_SIZE}, or leave the flag out"
    )


def dcp_reason(sparse: bool = False) -> str:
    what = "decode context parallelism"
    if sparse:
        what = f"sparse attention with {what}"
    return f"{what}. {_NO_DCP}"


def dcp_on_cpu_reason() -> str:
    return f"decode context parallelism on a CPU. {_NO_DCP}"


def batch_invariance_on_cpu_reason() -> str:
    """vLLM's own operators of that mode are Triton kernels, of which it has none for a CPU."""
    what = "batch-invariant mode on a CPU, where vLLM has no operators for it"
    return f"{what}. Mend: unset VLLM_BATCH_INVARIANT"


def hybrid_on_cpu_reason(architecture: str) -> str:
    """Of such models vLLM computes the other layers, as those of Kimi-Linear and Ling 2.5, with
    Triton, whose releases have no backend for a CPU."""
    return (
        f"{architecture} on a CPU: its linear attention is computed with Triton, which is not "
        "active here. Mend: a GPU"
    )


def refuse_sparse_dcp(vllm_config: Any) -> None:
    """ValueError where ranks share out the tokens of a request: each would choose among its own.
    vLLM before 0.28 does not ask the backend."""
    if vllm_config.parallel_config.decode_context_parallel_size > 1:
        raise cannot_serve(dcp_reason(sparse=True))


def refuse_hisparse(vllm_config: Any) -> None:
    """ValueError where newer versions of vLLM shall keep the caches of sparse layers in the host's
    memory. Their selection does not ask a backend, and fails later on an assertion."""
    attention = getattr(vllm_config, "attention_config", None)
    if getattr(attention, "hisparse_config", None) is not None:
        raise RefusalError(
            "mla-backend does not support HiSparse (KV caches in the memory of the host). Mend: "
            "leave hisparse_config out of --attention-config and HiSparseConnector out of "
            "--kv-transfer-config"
        )


def is_compute_capability_served(capability: tuple[int, int]) -> bool:
    return capability[0] in COMPUTE_GENERATIONS or envs.get("MLA_BACKEND_IMPL") in SLOW_IMPLS


def compute_generations() -> str:
    *first, last = (f"{generation}.x" for generation in COMPUTE_GENERATIONS)
    return f"{', '.join(first)} and {last}"


def refuse_layer_options(
    alibi_slopes: object, sliding_window: object, logits_soft_cap: object, attn_type: str
) -> None:
    """ValueError unless a layer is plain causal attention."""
    asked = {
        "alibi_slopes": alibi_slopes,
        "sliding_window": sliding_window,
        "logits_soft_cap": logits_soft_cap,
        "attn_type": None if attn_type == "decoder" else attn_type,
    }
    refused = [f"{name}={value}" for name, value in asked.items() if value is not None]
    if refused:
        raise RefusalError(f"mla-backend does not support {', '.join(refused)}. {ELSE}")


def refuse_models(vllm_config: Any) -> None:
    """ValueError for a model that this backend is asked to serve without being told all of it.

    vLLM leaves HYV4's sinks out, with a warning, where neither the backend nor its own
    FLASHMLA_SPARSE takes them. Layers of dots3_note are first built with the backend, then given
    classes of vLLM's own, while their indexer would stay this backend's.
    """
    config = getattr(vllm_config.model_config, "hf_text_config", None)
    if getattr(config, "learnable_sink", False):
        raise cannot_serve(
            "learnable attention sinks, which of vLLM's backends its own FLASHMLA_SPARSE takes: a "
            "warning about the sink, in the log, says why not here. Mend: what it names; without "
            "--attention-backend CUSTOM vLLM leaves the sinks out"
        )
    if getattr(config, "model_type", None) == "dots3_note":
        raise cannot_serve(f"dots3_note, to whose layers vLLM gives classes of its own. {ELSE}")


def refuse_heads(heads: int) -> None:
    """ValueError for more query heads than the kernels take on a rank."""
    if heads > MAX_HEADS:
        raise RefusalError(
            f"{heads} query heads on one rank; the kernels take {MAX_HEADS}. "
            f"Mend: a --tensor-parallel-size that leaves each rank at most {MAX_HEADS}"
        )


def refuse_step_shape(heads: int, query_len: int, *, dcp: int = 1, drafts: int = 0) -> None:
    """ValueError unless the decode kernels take steps of up to `query_len` new tokens a request,
    with `heads` query heads: those of a rank, under DCP those that the ranks of a group gather.

    Drafts under DCP are refused because vLLM's first model runner (0.26 to 0.33) computes the
    lengths of the ranks on the host, before it knows which drafts were rejected: answers were seen
    to be wrong. Its second one was not tried.
    """
    if dcp > 1 and drafts:
        raise cannot_serve(
            f"{drafts} speculative tokens with decode context parallelism, whose ranks vLLM gives "
            "lengths that count rejected drafts. Mend: --decode-context-parallel-size 1, or leave "
            "out --speculative-config"
        )
    refuse_heads(heads)
    if query_len > MAX_QUERY_LEN and drafts and query_len > 1 + drafts:
        raise RefusalError(
            f"{drafts} speculative tokens with parallel drafting, for which vLLM makes room for "
            f"{query_len} query tokens a request; the decode kernels take {MAX_QUERY_LEN}, so at "
            f"most {(MAX_QUERY_LEN - 1) // 2}. Mend: lower num_speculative_tokens"
        )
    if query_len > MAX_QUERY_LEN:
        raise RefusalError(
            f"{query_len - 1} speculative tokens; the decode kernels take {MAX_QUERY_LEN} query "
            f"tokens a request, so at most {MAX_QUERY_LEN - 1}. Mend: lower num_speculative_tokens"
        )


def refuse_microbatches(query_len: int, microbatches: int, graph_sizes: Sequence[int]) -> None:
    """ValueError for a CUDA graph of whole steps whose tokens, `query_len` of each request, vLLM
    cuts into `microbatches` (--enable-dbo) in the middle of a request.

    vLLM computes the lengths of such requests into new memory in every step, and a replay reads
    those of its capture.
    """
    cut = [size for size in graph_sizes if (size // microbatches) % query_len]
    if cut:
        raise cannot_serve(
            f"--enable-dbo with {query_len - 1} speculative tokens and CUDA graphs of "
            f"{', '.join(map(str, cut))} tokens, whose {microbatches} parts would cut a request of "
            f"{query_len}. Mend: cudagraph_capture_sizes of multiples of "
            f"{microbatches * query_len} in --compilation-config, or cudagraph_mode PIECEWISE"
        )


def kv_cache_dtype_reason(kv_cache_dtype: str) -> str:
    return (
        f"KV cache dtype {kv_cache_dtype}; supported: {', '.join(KV_CACHE_DTYPES)}. "
        "Mend: --kv-cache-dtype auto"
    )


def fp8_prompts_reason(kv_cache_dtype: str) -> str:
    """Kimi-Linear and Kimi-K3 have layers of their own on CUDA, which quantise prompts with such a
    cache and assert that the prefill backend takes them; with fp8_ds_mla, that it does not."""
    if kv_cache_dtype == "fp8_ds_mla":
        return (
            "KV cache dtype fp8_ds_mla with prompts in fp8 in vLLM's layers of Kimi-Linear and "
            "Kimi-K3. Mend: no use_prefill_query_quantization in --attention-config"
        )
    return (
        f"KV cache dtype {kv_cache_dtype} in vLLM's layers of Kimi-Linear and Kimi-K3, which then "
        "need prompts in fp8: those take a GPU of 10.x and use_prefill_query_quantization in "
        "--attention-config. Mend: --kv-cache-dtype bfloat16 (auto may be the checkpoint's fp8)"
    )


def is_mla_model(model: Any) -> bool:
    """Whether vLLM asks for the attention class of this model's layers as MLA, `model` its
    ModelConfig. Those of DeepSeek-V4, whose rows stand for several tokens, count as MLA to it too,
    but have classes and pages of their own, whatever backend is selected."""
    return bool(model.use_mla) and not any(
        hasattr(model.hf_text_config, key) for key in _COMPRESSED
    )


def not_mla_reason(architecture: str | None = None) -> str:
    model = architecture or "this model or layer"
    return (
        f"{model} does not use multi-head latent attention (MLA), the only attention this "
        f"backend computes. {ELSE}"
    )


def _dtype_name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _head_sizes(sparse: bool) -> tuple[int, ...]:
    return SPARSE_HEAD_SIZES if sparse else tuple(HEAD_SIZES)


ELSE = "Mend: leave out --attention-backend CUSTOM"

_WORDS: dict[str, Callable[[dict[str, Any]], str]] = {
    "head_size not supported": lambda c: (
        f"cache row of {c['head_size']} elements; the kernels take "
        + " or ".join(f"{size} ({HEAD_SIZES[size]})" for size in _head_sizes(c["use_sparse"]))
        + f". {ELSE}"
    ),
    "dtype not supported": lambda c: (
        f"model dtype {_dtype_name(c['dtype'])}; supported: {', '.join(DTYPES)}. "
        "Mend: --dtype bfloat16"
    ),
    "kv_cache_dtype not supported": lambda c: kv_cache_dtype_reason(c["kv_cache_dtype"]),
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
    "DCP not supported": lambda c: dcp_reason(c["use_sparse"]),
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
    kv_cache_dtype, dtype = config["kv_cache_dtype"], _dtype_name(config["dtype"])
    reasons = []
    if config["device_capability"] is None and config.get("use_dcp"):
        reasons.append(dcp_on_cpu_reason())
    if config["device_capability"] is None and config.get("use_batch_invariant"):
        reasons.append(batch_invariance_on_cpu_reason())
    if config["device_capability"] is not None:
        reasons += _gpu_reasons(dtype, config["use_sparse"], config["device_capability"])
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
