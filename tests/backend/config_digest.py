# SPDX-License-Identifier: Apache-2.0
"""Prints what vLLM makes of models when no attention backend is asked for, as JSON.

python config_digest.py MODEL...
"""

import json
import sys

import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.v1.attention.selector import AttentionSelectorConfig


def describe(model):
    config = EngineArgs(
        model=model, max_model_len=256, skip_tokenizer_init=True
    ).create_engine_config()
    config.instance_id = ""  # random
    layer = AttentionSelectorConfig(
        head_size=config.model_config.get_head_size(),
        dtype=torch.bfloat16,
        kv_cache_dtype="auto",
        block_size=None,
        use_mla=config.model_config.use_mla,
    )
    sections = ("cache", "scheduler", "compilation", "attention", "parallel", "model")
    return {
        "config": str(config),
        **{name: str(getattr(config, f"{name}_config")) for name in sections},
        "attention class": attention_class(layer),
    }


def attention_class(layer):
    try:
        return current_platform.get_attn_backend_cls(None, layer)
    except NotImplementedError as refusal:  # of MLA, by vLLM before 0.28
        return repr(refusal)


answers = {"platform": type(current_platform).__name__}
answers |= {model: describe(model) for model in sys.argv[1:]}
print("DIGEST" + json.dumps(answers))
