# SPDX-License-Identifier: Apache-2.0
"""DeepSeek's configs with changes, and what is asked of a plan for them."""

import json
from pathlib import Path

from mla_serving.plan import cost, rates
from mla_serving.plan.layout import GIB

ROOT = Path(__file__).parents[3]
MODELS = ROOT / "configs" / "models"
V3, V32 = "deepseek-v3-5-layers", "deepseek-v3.2-5-layers"
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
DENSE_MODEL = {"n_routed_experts": None, "moe_intermediate_size": None}


def config(folder, **changes):
    return {**json.loads((MODELS / folder / "config.json").read_text()), **changes}


def weights(layout, model):
    """Of the GPU that holds most."""
    stages = [layout.weights(model, layers) for layers in layout.stages(model.layers)]
    return max(stages, key=lambda parts: sum(parts.values()))


# Elements of DeepSeek-V3's matrices, multiplied out.
Q_A, Q_B, KV_A = 11_010_048, 37_748_736, 4_128_768
KV_B, O_PROJ = 16_777_216, 117_440_512
EXPERT, DENSE, EMBEDDING = 44_040_192, 396_361_728, 926_679_040
NORMS = 2 * 7168 + 1536 + 512
ROUTER = 256 * 7168 + 256


def question(model, layout, **changes):
    settings = {
        "gpu": "h200",
        "memory": 140 * GIB,
        "utilization": 0.9,
        "reserve": 6 * GIB,
        "rates": rates.load("h200"),
        "kv_cache_dtype": "auto",
        "context": 4096,
        "batch": 64,
    }
    return cost.Question(model=model, layout=layout, **(settings | changes))


ROOFS = rates.Rates("test", read_gbps=4000, gemm_tflops=500, cases={})
REAL = {
    "V2-Lite": ("deepseek-v2-lite", {}, 15.7),
    "V3": (V3, {"num_hidden_layers": 61}, 671.0),
    "V3.2": (V32, {"num_hidden_layers": 61}, 671.9),
    "K2": (V3, {"num_hidden_layers": 61, "num_attention_heads": 64, "n_routed_experts": 384,
                "first_k_dense_replace": 1, "vocab_size": 163840}, 1026.4),
    "GLM-4.7-Flash": (V3, {"model_type": "glm4_moe_lite", "num_hidden_layers": 47,
                           "hidden_size": 2048, "num_attention_heads": 20, "q_lora_rank": 768,
                           "qk_nope_head_dim": 192, "v_head_dim": 256, "n_routed_experts": 64,
                           "first_k_dense_replace": 1, "intermediate_size": 10240,
                           "moe_intermediate_size": 1536, "vocab_size": 154880}, 29.9),
    "GLM-5": (V32, {"model_type": "glm_moe_dsa", "num_hidden_layers": 78, "hidden_size": 6144,
                    "num_attention_heads": 64, "q_lora_rank": 2048, "qk_nope_head_dim": 192,
                    "v_head_dim": 256, "intermediate_size": 12288, "index_n_heads": 32,
                    "vocab_size": 154880}, 743.9),
}  # fmt: skip
