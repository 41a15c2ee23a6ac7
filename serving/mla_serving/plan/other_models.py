# SPDX-License-Identifier: Apache-2.0
"""Models of which the plan would be wrong, by their config.json."""

from collections.abc import Mapping
from typing import Any

LONGCAT = "longcat_flash"  # the model_type of LongCat-Flash
# Keys of models with experts; how many is read as vLLM's DeepSeek model reads it.
EXPERTS = "n_routed_experts"
_OF_EXPERTS = ("num_experts", "num_local_experts", "moe_intermediate_size")
# Keys of models whose other layers are linear attention (Kimi Linear, Ling 2.5).
_HYBRID = ("linear_attn_config", "layer_group_size")
_OF_DEEPSEEK = ("q_lora_rank", EXPERTS, "n_shared_experts", "first_k_dense_replace")
# What transformers fills in where a config of these types has no such key, with the numbers of
# the maker's own models; null is none.
_FILLED: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2"), _OF_DEEPSEEK),
    "glm_moe_dsa": (*_OF_DEEPSEEK, "index_topk"),
    "glm4_moe_lite": ("q_lora_rank", EXPERTS, "n_shared_experts"),
    LONGCAT: ("q_lora_rank", EXPERTS, "zero_expert_num"),
}


def refuse(config: Mapping[str, Any], name: str) -> None:
    """ValueError for a model of which the plan would be wrong."""
    if config.get("kv_lora_rank") is None:
        raise ValueError(f"{name} has no kv_lora_rank: it does not use multi-head latent attention")
    if config.get("num_hidden_layers") is None and config.get("num_layers") is not None:
        raise ValueError(
            f"{name}: config.json has num_layers for num_hidden_layers, which the plan reads of "
            f"model_type {LONGCAT} only, got {config.get('model_type')}"
        )
    hybrid = [key for key in _HYBRID if config.get(key) not in (None, 1)]
    kinds = config.get("layer_types")
    if isinstance(kinds, list) and "linear_attention" in kinds:
        hybrid.append("linear_attention in layer_types")
    if hybrid:
        raise ValueError(
            f"{name}: config.json has {hybrid[0]}: not all its layers are latent attention, and "
            "linear ones keep a state, not rows"
        )
    refused = _refused_part(config)
    if refused:
        raise ValueError(f"{name}: config.json has {refused}, which the vLLM backend refuses")
    absent = [key for key in _FILLED.get(str(config.get("model_type")), ()) if key not in config]
    if absent:
        raise ValueError(
            f"{name}: config.json lacks {absent[0]}, for which vLLM takes that of the maker's own "
            "model: expected a number, or null for none"
        )
    uncounted = _uncounted_part(config)
    if uncounted:
        raise ValueError(f"{name}: config.json has {uncounted}, which the plan does not count")
    # Of a model whose experts have another name a dense one would be planned, far too small.
    others = [key for key in _OF_EXPERTS if config.get(key) not in (None, 0)]
    if others and config.get(EXPERTS) is None:
        raise ValueError(
            f"{name}: config.json has {others[0]} but no {EXPERTS}: expected the number of "
            f"experts as {EXPERTS}, 0 if it has none"
        )


def _refused_part(config: Mapping[str, Any]) -> str | None:
    """What of a model the backend refuses, beside the sizes that `served.py` checks."""
    kind = config.get("model_type")
    if config.get("learnable_sink", kind == "hy_v4"):
        return "learnable attention sinks"
    if config.get("index_kpool") not in (None, 1):
        return f"index_kpool {config['index_kpool']!r}"
    if config.get("is_causal") is False:
        return "is_causal false, for which vLLM has no MLA"
    return "model_type dots3_note" if kind == "dots3_note" else None


def _uncounted_part(config: Mapping[str, Any]) -> str | None:
    if config.get("ngram_vocab_size_ratio") is not None:
        return "ngram_vocab_size_ratio, embeddings of several tokens"
    if config.get("model_type") == LONGCAT and config.get("index_topk") is not None:
        return "index_topk, indexers of LongCat's attentions"
    return None
