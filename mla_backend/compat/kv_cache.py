# SPDX-License-Identifier: Apache-2.0
"""Layouts of vLLM's KV cache, and how wide its block tables are."""

import math
from typing import Any

from mla_backend.compat import versions

# A row of a block table is a multiple of so many tokens.
_TABLE_TOKENS = 128


def layer_compact_layouts() -> tuple[Any, ...] | None:
    """vLLM's KV cache layouts that keep a layer's pages together, its default first; None before
    0.29, which asks for a stride order instead."""
    try:
        from vllm.v1.kv_cache_layout import KVCacheLayout
    except ImportError:
        return None
    return (KVCacheLayout.LBNHC, KVCacheLayout.LBHNC)


def block_table_width(vllm_config: Any, block_size: int, *, sparse: bool = False) -> int:
    """Columns, of `block_size` tokens each, of vLLM's block tables: workspaces are sized for them,
    and kernels specialised.

    vLLM counts in its own blocks (--block-size, more for a hybrid model) and rounds up to 128
    tokens. Beside layers with larger pages it may count in still larger blocks. Under decode
    context parallelism a block stands for so many tokens on each rank; but the first model runner
    of vLLM 0.26 leaves the tables of groups with pages of several sizes as wide as without, so
    those of sparse layers.
    """
    own = max(vllm_config.cache_config.block_size or 0, block_size)
    ranks = vllm_config.parallel_config.decode_context_parallel_size
    if sparse and ranks > 1 and not _narrows_tables_of_mixed_groups(vllm_config):
        ranks = 1
    blocks = -(-vllm_config.model_config.max_model_len // (own * ranks))
    step = _TABLE_TOKENS // math.gcd(_TABLE_TOKENS, own)
    return int(-(-blocks // step) * step * own // block_size)


def _narrows_tables_of_mixed_groups(vllm_config: Any) -> bool:
    if vllm_config.use_v2_model_runner:
        return True
    from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs

    return "max_num_blocks_per_req" in vars(UniformTypeKVCacheSpecs)


def forgets_lengths_of_ranks(vllm_config: Any) -> bool:
    """Whether dummy steps come without lengths of the ranks of decode context parallelism: those
    of idle data-parallel ranks, too."""
    return versions.before((0, 30)) and bool(vllm_config.use_v2_model_runner)


def deals_within_64(vllm_config: Any) -> bool:
    """Whether ranks of decode context parallelism are dealt the tokens of each 64, the backend's
    blocks, and not of vLLM's own blocks, which may have more."""
    return versions.before((0, 29)) and bool(vllm_config.use_v2_model_runner)
