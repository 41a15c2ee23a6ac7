# SPDX-License-Identifier: Apache-2.0
"""vLLM's question about a layer."""

import pytest
import torch


def selector_config(**changes):
    """vLLM's AttentionSelectorConfig for one MLA layer of DeepSeek-V3, with `changes`."""
    from vllm.v1.attention.selector import AttentionSelectorConfig

    absent = set(changes) - set(AttentionSelectorConfig._fields)
    if absent:
        pytest.skip(f"this vLLM does not ask about {', '.join(absent)}")
    config = AttentionSelectorConfig(
        head_size=576, dtype=torch.bfloat16, kv_cache_dtype="auto", block_size=64, use_mla=True
    )
    return config._replace(**changes)
