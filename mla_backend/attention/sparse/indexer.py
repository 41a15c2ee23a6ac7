# SPDX-License-Identifier: Apache-2.0
"""The Lightning Indexer of one layer: writes the new keys, scores, and picks the tokens to read.

vLLM computes its q, keys and weights; this takes over from there. The work is a torch op of its
own, so that torch.compile sees one opaque call and vLLM can split its graph there.
"""

from typing import Any

import torch
from mla_kernels.indexer.api import HEAD_DIM, MAX_HEADS
from mla_kernels.topk.api import MAX_K
from mla_kernels.topk.plan import MAX_WIDTH
from vllm.compilation.breakable_cudagraph import eager_break_during_capture
from vllm.forward_context import get_forward_context
from vllm.utils.torch_utils import direct_register_custom_op

from mla_backend import compat
from mla_backend.attention import support
from mla_backend.attention.sparse.indexer_layer import IndexerLayer, attach, attached, is_attached
from mla_backend.attention.sparse.kernel import SparseKernel, shared_choice, topk_workspace
from mla_backend.attention.sparse.metadata import IndexerMetadata, SparseMetadata
from mla_backend.attention.sparse.rows import max_tokens
from mla_backend.attention.sparse.short_prompts import ExpandedBytes
from mla_backend.refusals import RefusalError, cannot_serve
from mla_backend.stats import STATS

OP_NAME = "mla_backend_sparse_indexer"


def take_over(
    indexer: Any,
    kernel: SparseKernel,
    backend: type,
    vllm_config: Any,
    device: Any,
    expanded_bytes: ExpandedBytes | None = None,
    gathered_bytes: int = 0,
) -> None:
    """Make the `Indexer` of one of vLLM's layers compute with our kernels, and nothing else.

    expanded_bytes, gathered_bytes: see `IndexerLayer`. ValueError for an indexer that the kernels
    do not take.
    """
    limits = {
        "index_head_dim": (indexer.head_dim, HEAD_DIM, HEAD_DIM),
        "index_n_heads": (indexer.n_head, 1, MAX_HEADS),
        "index_topk": (indexer.topk_tokens, 1, MAX_K),
        "index_kpool": (getattr(indexer, "index_kpool", 1), 1, 1),  # of GLM-5-Next: tokens of a key
    }
    for name, (value, low, high) in limits.items():
        if not low <= value <= high:
            allowed = f"{low}" if low == high else f"{low}..{high}"
            raise RefusalError(
                f"{name} is {value}; the indexer's kernels take {allowed}. {support.ELSE}"
            )
    name = indexer.k_cache.prefix
    max_blocks = compat.block_table_width(vllm_config, support.BLOCK_SIZE, sparse=True)
    impl = kernel.indexer
    by_kernel = device.type != "cpu" and impl not in support.SLOW_IMPLS
    if by_kernel and max_blocks * support.BLOCK_SIZE > MAX_WIDTH:
        raise cannot_serve(
            f"max_model_len {vllm_config.model_config.max_model_len} with sparse attention, whose "
            f"indexer's kernels choose among {MAX_WIDTH} tokens of a request at most. Mend: lower "
            "--max-model-len"
        )
    tokens = max_tokens(vllm_config)
    layer = IndexerLayer(
        heads=indexer.n_head,
        dtype=torch.get_default_dtype(),  # the model's, while vLLM builds it
        scale_format="fp32" if indexer.scale_fmt is None else indexer.scale_fmt,
        impl=impl,
        workspace=topk_workspace(vllm_config, tokens, max_blocks, device, impl),
        topk_indices=indexer.topk_indices_buffer,
        fp8_products=kernel.fp8_products,
        deterministic=kernel.deterministic,
        shared=shared_choice(vllm_config, tokens, indexer.topk_tokens, device),
        gathered_bytes=gathered_bytes,
        expanded_bytes=expanded_bytes,
    )
    attach(indexer.k_cache, layer)

    def forward(
        hidden_states: torch.Tensor, q: torch.Tensor, k: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        topk_indices = indexer.topk_indices_buffer
        getattr(torch.ops.vllm, OP_NAME)(q, k, weights, topk_indices, name)
        return topk_indices

    compat.replace_indexer(indexer, forward, backend, quantise_queries)
    compat.split_graph_at(vllm_config, f"vllm::{OP_NAME}")
    compat.route_fused_indexer(run_indexer, is_ours)


def is_ours(layer_name: str) -> bool:
    """Whether the engine whose step runs computes the indexer of this cache with our kernels."""
    return is_attached(get_forward_context().no_compile_layers.get(layer_name))


def run_indexer(
    q: torch.Tensor,
    k: torch.Tensor | None,
    weights: torch.Tensor,
    topk_indices: torch.Tensor,
    layer_name: str,
) -> None:
    """Write `topk_indices` [>= T, index_topk] int32: ascending positions, -1 after the last; under
    decode context parallelism positions among this rank's own tokens.

    q           [>= T, heads, 128] float8_e4m3fn; the rows past T are padding
    k           [>= T, 128], RoPE applied; None: already in the cache
    weights     [>= T, heads], scale of q and softmax scale folded in
    layer_name  of the indexer's cache
    """
    context = get_forward_context()
    cache = context.no_compile_layers[layer_name]
    layer = attached(cache)
    if not isinstance(context.attn_metadata, dict):  # profiling: there is no cache yet
        layer.profile(q.shape[0])
        return
    metadata: IndexerMetadata = context.attn_metadata[layer_name]
    rows = metadata.rows
    if layer.attention is not None:
        step: SparseMetadata = context.attn_metadata[layer.attention]
        if step.prefill is not None:
            rows = rows.first(step.num_decodes, step.num_decode_tokens)
    STATS.indexer_calls += 1
    STATS.indexer_tokens += rows.lengths.shape[0]
    layer.run(q, k, weights, topk_indices, cache.kv_cache, rows, metadata.slot_mapping)


@eager_break_during_capture  # graphs of VLLM_USE_BREAKABLE_CUDAGRAPH know no splitting_ops
def _op(
    q: torch.Tensor,
    k: torch.Tensor,
    weights: torch.Tensor,
    topk_indices: torch.Tensor,
    layer_name: str,
) -> None:
    run_indexer(q, k, weights, topk_indices, layer_name)


def _traced(
    q: torch.Tensor,
    k: torch.Tensor,
    weights: torch.Tensor,
    topk_indices: torch.Tensor,
    layer_name: str,
) -> None:
    """What tracing needs to know: nothing is returned."""


direct_register_custom_op(
    op_name=OP_NAME, op_func=_op, mutates_args=["topk_indices"], fake_impl=_traced
)


def quantise_queries(
    x: torch.Tensor,
    group_size: int,
    eps: float = 1e-10,
    *,
    use_ue8m0: bool | None = None,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """vLLM's `per_token_group_quant_fp8` in torch, for a CPU, which has no kernel for it.

    x [T, D], D a multiple of group_size -> codes [T, D] float8_e4m3fn, scales [T, D / group_size].
    """
    limit = torch.finfo(torch.float8_e4m3fn).max
    groups = x.float().unflatten(-1, (-1, group_size))
    scales = groups.abs().amax(-1).clamp(min=eps) / limit
    if use_ue8m0:
        scales = torch.exp2(torch.ceil(torch.log2(scales)))
    codes = (groups / scales[..., None]).clamp(-limit, limit)
    return codes.flatten(-2).to(torch.float8_e4m3fn), scales
