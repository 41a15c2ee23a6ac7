# SPDX-License-Identifier: Apache-2.0
"""Hybrid models, as Ling 2.5: latent beside linear attention.

vLLM zeroes the blocks that a request newly gets, by their numbers. Of a layer whose pages are
smaller than a block (ours have 64 tokens) these name other requests' pages.
"""

from typing import Any

import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec


def zero_blocks(runner: Any, block_ids: list[int]) -> None:
    """Zero the pages of `block_ids`, blocks of vLLM's cache manager, in all full attention layers
    of a model `runner` of vLLM, which may cut a block into several pages."""
    config, layers = runner.kv_cache_config, runner.compilation_config.static_forward_context
    for group in config.kv_cache_groups:
        if not isinstance(group.kv_cache_spec, FullAttentionSpec):
            continue
        for name in group.layer_names:
            cache = getattr(layers.get(name), "kv_cache", None)
            if not isinstance(cache, torch.Tensor):
                continue
            pages = cache.shape[0] // config.num_blocks
            for block in block_ids:
                cache[block * pages : (block + 1) * pages].zero_()
