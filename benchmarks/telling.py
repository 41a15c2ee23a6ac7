# SPDX-License-Identifier: Apache-2.0
"""Random weights of models whose answers are compared: attention decides what they say."""

import zlib
from typing import Any

TELLING = "telling"  # a load format
# As the demo models' (mla_serving.demo_model.weights): attention picks few keys.
GAINS = {"q_proj": 2.0, "q_b_proj": 2.0}
# What adds to the residual stream.
ENDS = ("o_proj.weight", "down_proj.weight", "experts.w2_weight")


def register_weights(*, deep: bool = False) -> None:
    """The load format TELLING: random weights of variance 1 / fan in, the same in every engine.

    deep: what a layer adds is scaled down by the number of layers, as GPT-2 was initialised: else
    tens of layers enlarge the rounding of bf16 until sound engines say unlike things.

    Those of vLLM's "dummy" lie within 0.001 of 0: all logits are alike, whatever attention does.
    """
    import torch
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    @register_model_loader(TELLING)
    class Loader(DummyModelLoader):
        @torch.no_grad()
        def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
            parts = 2 * model_config.hf_text_config.num_hidden_layers if deep else 1
            for name, weight in model.named_parameters():
                if weight.element_size() == 1:
                    raise ValueError(f"expected a model that is not quantised, got {name}")
                if weight.dim() == 1:  # norms
                    weight.fill_(1.0)
                    continue
                gain = GAINS.get(name.split(".")[-2], 1.0)
                if name.endswith(ENDS):
                    gain *= parts**-0.5
                width = 1 if "embed_tokens" in name else weight.shape[-1]
                generator = torch.Generator(weight.device).manual_seed(zlib.crc32(name.encode()))
                weight.normal_(0, gain * width**-0.5, generator=generator)
