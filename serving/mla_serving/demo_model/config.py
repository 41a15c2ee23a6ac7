# SPDX-License-Identifier: Apache-2.0
"""config.json of each demo family: the keys of DeepSeek's own releases, small numbers in them.

It is written by hand, not through transformers' config classes: those drop keys that vLLM reads
(`topk_method`, `scoring_func`), without which the router's bias is not even loaded.
"""

from collections.abc import Mapping
from typing import Any

SERVED_NAME = "mla-demo"  # to clients of the server, whatever the family
VOCAB_SIZE = 2048
CONTEXT_LENGTH = 8192

_COMMON: dict[str, Any] = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 256,
    "initializer_range": 0.02,
    "intermediate_size": 512,
    "kv_lora_rank": 512,
    "max_position_embeddings": CONTEXT_LENGTH,
    "moe_intermediate_size": 128,
    "moe_layer_freq": 1,
    "n_routed_experts": 8,
    "num_attention_heads": 16,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 4,
    "num_key_value_heads": 16,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 10000,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "v_head_dim": 128,
    "vocab_size": VOCAB_SIZE,
}

_V2_LITE: dict[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "n_group": 1,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "q_lora_rank": None,
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "topk_group": 1,
    "topk_method": "greedy",
}

_V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "n_group": 2,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_nextn_predict_layers": 0,
    "q_lora_rank": 96,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_group": 1,
    "topk_method": "noaux_tc",
}

_V32: dict[str, Any] = _V3 | {
    "architectures": ["DeepseekV32ForCausalLM"],
    "model_type": "deepseek_v32",
    "index_head_dim": 128,
    "index_n_heads": 8,
    # Fewer than the context has, so that long prompts are read sparsely.
    "index_topk": 512,
}


def _yarn(mscale: float) -> dict[str, Any]:
    return {
        "type": "yarn",
        "factor": 4,
        "original_max_position_embeddings": CONTEXT_LENGTH // 4,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": mscale,
        "mscale_all_dim": mscale,
    }


FAMILIES: dict[str, dict[str, Any]] = {
    "v2-lite": _COMMON | _V2_LITE | {"rope_scaling": _yarn(0.707)},
    "v3": _COMMON | _V3 | {"rope_scaling": _yarn(1.0)},
    "v3-default-rope": _COMMON | _V3,
    "v3.2": _COMMON | _V32 | {"rope_scaling": _yarn(1.0)},
}


def family_config(family: str, overrides: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """config.json of `family` as a dict, with `overrides` of keys that it has.

    Raises:
        ValueError: unknown family, or an override of a key that config.json does not have.
    """
    if family not in FAMILIES:
        raise ValueError(f"family is {family!r}; allowed: {', '.join(FAMILIES)}")
    config = FAMILIES[family]
    unknown = sorted(set(overrides or ()) - set(config))
    if unknown:
        raise ValueError(f"no such key in config.json of {family}: {', '.join(unknown)}")
    return config | dict(overrides or {})
