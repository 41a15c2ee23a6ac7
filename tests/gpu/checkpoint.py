# SPDX-License-Identifier: Apache-2.0
"""The models of the GPU tests: DeepSeek's attention at full width, little else."""

from mla_serving.demo_model import FAMILIES, make_demo_model

LAYERS = 4
LONG = 160_000
EXPERTS = 8


def make_checkpoint(folder, heads):
    """A demo model with an MTP layer and without experts, so that rounding flips no router.

    heads: of a dense model; or "v3.2", a sparse one with DeepSeek-V3.2's own numbers of heads; or
    "v3.2 all", the same that reads up to 2048 tokens; or "v3.2 few", that with 16 heads, as on one
    of 8 tensor-parallel GPUs; or "long", one of 16 heads whose context is twice LONG; or "v3.2
    long", "v3.2 all" with such a context and one layer: what its indexer sees is the same in every
    engine, so that they choose the same 2048 tokens but for ties; or "v2", DeepSeek-V2-Lite's
    attention, without an MTP layer: vLLM takes no DeepSeek-V3 for a draft model; or "experts", a
    dense model of 128 heads with experts in all layers but the first, each token to all of them.
    """
    family, others = "v3", {}
    rope = FAMILIES[family]["rope_scaling"]
    factor = -(-2 * LONG // rope["original_max_position_embeddings"])
    long = {"max_position_embeddings": 2 * LONG, "rope_scaling": {**rope, "factor": factor}}
    if heads == "v3.2":
        family, heads, others = heads, 128, {"index_n_heads": 64}
    elif heads in ("v3.2 all", "v3.2 few"):
        others = {"index_n_heads": 64, "index_topk": 2048}
        family, heads = "v3.2", 16 if heads == "v3.2 few" else 128
    elif heads == "v3.2 long":
        others = {"index_n_heads": 64, "index_topk": 2048, "num_hidden_layers": 1, **long}
        family, heads = "v3.2", 128
    elif heads == "long":
        heads, others = 16, long
    elif heads == "v2":
        family, heads = "v2-lite", 16
    elif heads == "experts":
        every = {"n_routed_experts": EXPERTS, "num_experts_per_tok": EXPERTS, "n_group": 1}
        heads, others = 128, {"first_k_dense_replace": 1, "num_nextn_predict_layers": 0, **every}
    overrides = {
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "num_hidden_layers": LAYERS,
        "first_k_dense_replace": LAYERS + 1,
    }
    if family != "v2-lite":
        overrides["num_nextn_predict_layers"] = 1
    return make_demo_model(family, folder, overrides=overrides | others)
