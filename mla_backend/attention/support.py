# SPDX-License-Identifier: Apache-2.0
"""What the dense backend takes, and what both take; refusals of what vLLM asks no backend about.
Its reasons about layers: layer_reasons.py. Imports neither vLLM nor torch."""

from collections.abc import Sequence
from typing import Any

from mla_backend import envs
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
ELSE = "Mend: leave out --attention-backend CUSTOM"
_NO_DCP = "Mend: --decode-context-parallel-size 1"


def block_size_reason(block_size: int) -> str:
    return (
        f"block size {block_size} is not a multiple of {BLOCK_SIZE}. "
        f"Mend: --block-size {BLOCK_SIZE}, or leave the flag out"
    )


def dcp_reason() -> str:
    return f"decode context parallelism. {_NO_DCP}"


def dcp_on_cpu_reason(ranks: int | None = None) -> str:
    """ranks: how many were asked for; None where vLLM only says that there are several."""
    of_ranks = "" if ranks is None else f" of {ranks} ranks"
    return f"decode context parallelism{of_ranks} on a CPU. {_NO_DCP}"


def drafts_in_stages_on_cpu_reason(drafts: int, stages: int) -> str:
    """vLLM 0.32 ends with a Python error; releases that lack the line at fault would start."""
    return (
        f"{drafts} speculative tokens with pipeline parallelism of {stages} stages on a CPU, where "
        "vLLM's stages before the last lose which drafts were accepted. Mend: "
        "--pipeline-parallel-size 1, or leave out --speculative-config"
    )


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


def lora_of_experts_on_cpu_reason(architecture: str) -> str:
    """An engine that takes adapters computes all experts with vLLM's Triton kernels."""
    return (
        f"LoRA adapters beside the experts of {architecture} on a CPU, which vLLM then computes "
        "with Triton, which is not active here. Mend: leave out --enable-lora and merge the "
        "adapter into the weights, or a GPU"
    )


def refuse_sparse_dcp(vllm_config: Any, *, on_cpu: bool) -> None:
    """ValueError unless the ranks can share out the tokens of sparse layers. vLLM before 0.30 does
    not ask the backend."""
    parallel = vllm_config.parallel_config
    ranks = parallel.decode_context_parallel_size
    if ranks == 1:
        return
    if on_cpu:
        raise cannot_serve(dcp_on_cpu_reason(ranks))
    refuse_shared_microbatches(parallel.num_ubatches)
    if (speculative := vllm_config.speculative_config) is not None:
        refuse_drafter(speculative.method, speculative.parallel_drafting)


def refuse_shared_microbatches(microbatches: int) -> None:
    """ValueError for --enable-dbo under decode context parallelism. vLLM gives its parts of a step
    no lengths of the ranks; two of a sparse layer would exchange their choices in the same memory.
    """
    if microbatches > 1:
        raise cannot_serve(
            f"{microbatches} microbatches (--enable-dbo) under decode context parallelism. "
            "Mend: leave out --enable-dbo, or --decode-context-parallel-size 1"
        )


def refuse_borrowed_choice(stages: int, microbatches: int, *, chosen: bool) -> None:
    """ValueError for a sparse layer that reads what an earlier one chose (GLM-5) where vLLM brings
    it something else. chosen: an earlier layer of this pipeline stage chooses."""
    if stages > 1 and not chosen:
        raise cannot_serve(
            f"a layer that reads the choice of an earlier one, which is on another of {stages} "
            "pipeline stages: vLLM does not pass the choice on. Mend: --pipeline-parallel-size 1, "
            "or VLLM_PP_LAYER_PARTITION, so that each stage begins with a layer that has an indexer"
        )
    if microbatches > 1:
        raise cannot_serve(
            f"{microbatches} microbatches (--enable-dbo) with layers that read the choice of an "
            "earlier one, which the other microbatch overwrites. Mend: leave out --enable-dbo"
        )


def refuse_interleave(run: int, within_64: bool) -> None:
    """ValueError for runs of tokens that vLLM would deal to ranks of decode context parallelism in
    another way than it says. To be asked by metadata builders: vLLM settles them after the layers.

    within_64: `compat.deals_within_64`
    """
    if within_64 and BLOCK_SIZE % run:
        raise cannot_serve(
            f"--cp-kv-cache-interleave-size {run}: the second model runner of vLLM before 0.29 "
            f"deals tokens within blocks of {BLOCK_SIZE}, so that some would lie on other ranks "
            f"than their places say. Mend: one that divides {BLOCK_SIZE}, or "
            "VLLM_USE_V2_MODEL_RUNNER=0"
        )


def refuse_extends_of_ranks(most: int | None, ranks: int) -> None:
    """ValueError for an MLA_BACKEND_EXTEND_TOKENS that changes nothing: ranks that share the cache
    of a request out take no end of its prompt in absorbed form. most: None = auto."""
    if most and ranks > 1:
        raise cannot_serve(
            f"MLA_BACKEND_EXTEND_TOKENS={most} with decode context parallelism of {ranks} ranks, "
            "where prompts attend in expanded form alone. Mend: unset MLA_BACKEND_EXTEND_TOKENS, "
            "or --decode-context-parallel-size 1"
        )


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


def refuse_drafter(method: str | None, parallel: bool) -> None:
    """ValueError for drafts that vLLM makes with more tokens of each request than the model's step
    has, under DCP: it writes these where a rank that has all tokens would (seen in 0.26 to 0.32).
    """
    if method == "draft_model" or parallel:
        what = "a draft model of its own" if method == "draft_model" else "parallel drafting"
        raise cannot_serve(
            f"{what} (speculative method {method}) with decode context parallelism, where vLLM "
            "would write drafts to another rank's places. Mend: --decode-context-parallel-size 1, "
            "or another method in --speculative-config, such as mtp"
        )


def refuse_step_shape(heads: int, query_len: int, *, drafts: int = 0) -> None:
    """ValueError unless the decode kernels take steps of up to `query_len` new tokens a request,
    with `heads` query heads: those of a rank, under DCP those that the ranks of a group gather."""
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

    A replay launches what its capture did: for whole requests another plan than for parts of some,
    which from step to step are others. vLLM's first model runner also computes the lengths of such
    requests into new memory in every step.
    """
    cut = [size for size in graph_sizes if (size // microbatches) % query_len]
    if cut:
        raise cannot_serve(
            f"--enable-dbo with {query_len - 1} speculative tokens and CUDA graphs of "
            f"{', '.join(map(str, cut))} tokens, whose {microbatches} parts would cut a request of "
            f"{query_len}. Mend: cudagraph_capture_sizes of multiples of "
            f"{microbatches * query_len} in --compilation-config, or cudagraph_mode PIECEWISE"
        )


def dtype_name(dtype: Any) -> str:
    """As vLLM's options name it."""
    return str(dtype).removeprefix("torch.")


def kv_cache_dtype_reason(kv_cache_dtype: str, dtype: Any) -> str:
    """`dtype` is the model's, whose own cache there is but for float32."""
    own = dtype_name(dtype)
    return (
        f"KV cache dtype {kv_cache_dtype}; supported: {', '.join(KV_CACHE_DTYPES)}. "
        f"Mend: --kv-cache-dtype {own if own in KV_CACHE_DTYPES else 'fp8'} "
        "(auto may be the checkpoint's own)"
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
