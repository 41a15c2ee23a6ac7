# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V3.2's indexer: vLLM builds it, this backend's kernels compute it.

It is a module, `Indexer`, with a custom op for the kernels. From 0.29 on the CUDA model has a file
of its own, which calls a function instead of the op.
"""

import inspect
import sys
from collections.abc import Callable
from typing import Any

from mla_backend.compat import versions

# The file of the CUDA model's own, where an engine has loaded it: since 0.27, and in 0.26.
_FUSED_MODELS = ("vllm.models.deepseek_v32.attention", "vllm.models.deepseek_v32.nvidia.attention")


def indexer_needs_fp8_type() -> bool:
    """Whether vLLM's own part of DeepSeek-V3.2's indexer on CUDA is a Triton kernel of a type that
    Triton has from sm_89 on. Before 0.29 it can be done without: see `replace_indexer`."""
    return not versions.before((0, 29))


def build_indexers_without_deepgemm(ours: Callable[[Any], bool]) -> None:
    """Let vLLM build the operator of a sparse layer's indexer on CUDA without DeepGEMM, where
    `ours(vllm_config)`: `replace_indexer` takes it over before it computes.

    The operator asks for DeepGEMM while it is built, long before the layer's class is chosen. Its
    module is imported here, which takes seconds, so only where there is no DeepGEMM.
    """
    from vllm.platforms import current_platform
    from vllm.utils.import_utils import has_deep_gemm as installed

    if not current_platform.is_cuda() or installed():
        return
    from vllm.config import get_current_vllm_config

    try:
        from vllm.model_executor.layers import sparse_attn_indexer as module
    except ImportError:  # then no such model can be built, and others need not fail for it
        return
    stock = getattr(module, "has_deep_gemm", None)
    if stock is None or hasattr(stock, "for_others"):
        return

    def has_deep_gemm() -> bool:
        return stock() or ours(get_current_vllm_config())

    has_deep_gemm.for_others = True  # type: ignore[attr-defined]
    module.has_deep_gemm = has_deep_gemm


def replace_indexer(
    indexer: Any, forward: Callable[..., Any], backend: type, quantise: Callable[..., Any]
) -> None:
    """Make one `Indexer` of vLLM's compute with `forward` and describe its steps by `backend`.

    `forward(hidden_states, q, k, weights)` takes the place of the kernels of vLLM's custom op;
    other layers and other models keep theirs. vLLM has no CPU kernel to quantise the queries, and
    runs no such model on a CPU: there `quantise` takes that function's place. Below sm_89 the
    Triton kernel that does it along with RoPE does not compile: vLLM's CUDA operator is taken.
    """
    from vllm.model_executor.models import deepseek_v2
    from vllm.platforms import current_platform

    indexer.indexer_op._forward_method = forward
    indexer.k_cache.get_attn_backend = lambda: backend
    if current_platform.is_cpu():
        deepseek_v2.per_token_group_quant_fp8 = quantise
    elif not current_platform.has_device_capability(89):
        indexer.use_fused_indexer_q = False


def split_graph_at(vllm_config: Any, op: str) -> None:
    """Keep `op` out of piecewise CUDA graphs, as vLLM does with its own indexer."""
    splitting = vllm_config.compilation_config.splitting_ops
    if splitting and op not in splitting:
        splitting.append(op)


def route_fused_indexer(run: Callable[..., None], is_ours: Callable[[str], bool]) -> None:
    """From 0.29 the CUDA model of DeepSeek-V3.2 calls a function for the indexer, not the op; so
    does the other model of 0.26 to 0.28, which `model_class_overrides` choose.

    Its fused kernel has written the keys to the cache by then. `run(q, None, weights, topk,
    layer_name)` is called for layers that are ours, vLLM's function for others. ValueError where
    that kernel writes scales that the indexer's kernels do not read (0.33 on sm_100).
    """
    loaded = (sys.modules.get(name) for name in _FUSED_MODELS)
    module = next((m for m in loaded if hasattr(m, "sparse_attn_indexer")), None)
    if module is None:
        return
    stock = module.sparse_attn_indexer
    writer = sys.modules.get("vllm.models.deepseek_v32.common.kernels")
    mx_scales = getattr(writer, "mqa_logits_use_mx_scales", None)
    if mx_scales is not None and mx_scales():
        running = versions.installed_vllm_version()
        raise ValueError(
            f"on this GPU vLLM {running} writes the keys of DeepSeek-V3.2's "
            "indexer with MX scales (ue8m0); the kernels read fp32 scales. Mend: vLLM 0.32, or "
            "leave out --attention-backend CUSTOM"
        )
    if hasattr(stock, "routed"):
        return
    names = list(inspect.signature(stock).parameters)
    layer, q, weights, topk = (
        names.index(name)
        for name in ("k_cache_prefix", "q_quant", "weights", "topk_indices_buffer")
    )

    def sparse_attn_indexer(*args: Any, **kwargs: Any) -> Any:
        if not is_ours(args[layer]):
            return stock(*args, **kwargs)
        run(args[q], None, args[weights], args[topk], args[layer])
        return args[topk]

    sparse_attn_indexer.routed = True  # type: ignore[attr-defined]
    module.sparse_attn_indexer = sparse_attn_indexer  # type: ignore[attr-defined]
