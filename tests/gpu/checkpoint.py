# SPDX-License-Identifier: Apache-2.0
"""The model of the GPU tests: DeepSeek-V3's attention at full width, little else."""

from mla_serving.demo_model import make_demo_model

LAYERS = 4


def make_checkpoint(folder, heads):
    """A demo model with an MTP layer and without experts, so that rounding flips no router."""
    overrides = {
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "num_hidden_layers": LAYERS,
        "first_k_dense_replace": LAYERS + 1,
        "num_nextn_predict_layers": 1,
    }
    return make_demo_model("v3", folder, overrides=overrides)
