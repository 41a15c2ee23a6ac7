# SPDX-License-Identifier: Apache-2.0
"""Random weights under DeepSeek's checkpoint names, the same bits on every machine.

Values come from the raw words of PCG64, the only numpy stream that is promised never to change, and
only through exact or correctly rounded operations: torch's normal_() differs between CPUs. Each
tensor has its own stream, keyed by its name.
"""

import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

# Scores then spread by 2, not 1: attention picks few keys, so a fault in it shows in the tokens at
# any context length.
_QUERY_GAIN = 2.0
# Well separated greedy tokens: the best logit leads by far more than fp32 rounding.
_LOGIT_GAIN = 3.0
# A longer row for the end token makes answers end by themselves, after some tens of tokens.
_EOS_GAIN = 1.75


def make_weights(config: dict[str, Any], seed: int) -> dict[str, torch.Tensor]:
    """All tensors of the checkpoint, bf16 (the router's bias fp32, as in DeepSeek's releases)."""
    weights = {name: _random(name, shape, gain, seed) for name, shape, gain in _tensors(config)}
    weights["lm_head.weight"][config["eos_token_id"]] *= _EOS_GAIN
    return weights


def _random(name: str, shape: tuple[int, ...], gain: float, seed: int) -> torch.Tensor:
    """Uniform, of standard deviation gain / sqrt(fan in); norms 1 +- 0.1, their biases +- 0.1,
    router biases +- 0.02."""
    count = int(np.prod(shape))
    stream = np.random.PCG64(np.random.SeedSequence([seed, zlib.crc32(name.encode())]))
    words = stream.random_raw(-(-count // 4)).astype("<u8").view("<i2")[:count]
    unit = words.astype(np.float32).reshape(shape) / np.float32(32768)  # in [-1, 1)
    if name.endswith("e_score_correction_bias"):
        return torch.from_numpy(unit * np.float32(0.02))
    if name.endswith("norm.weight"):
        return torch.from_numpy(1 + unit * np.float32(0.1)).to(torch.bfloat16)
    if name.endswith("norm.bias"):
        return torch.from_numpy(unit * np.float32(0.1)).to(torch.bfloat16)
    return torch.from_numpy(unit * np.float32(gain * (3 / shape[-1]) ** 0.5)).to(torch.bfloat16)


def _tensors(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...], float]]:
    """(name, shape, gain) of every tensor; a weight is [out features, in features]."""
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    yield "model.embed_tokens.weight", (vocab, hidden), 1.0
    layers = config["num_hidden_layers"]
    for layer in range(layers):
        yield from _layer(layer, config)
    yield "model.norm.weight", (hidden,), 1.0
    yield "lm_head.weight", (vocab, hidden), _LOGIT_GAIN
    for layer in range(layers, layers + config.get("num_nextn_predict_layers", 0)):
        yield from _layer(layer, config)
        prefix = f"model.layers.{layer}"  # a draft layer: multi-token prediction (MTP)
        yield f"{prefix}.embed_tokens.weight", (vocab, hidden), 1.0
        for norm in ("enorm", "hnorm", "shared_head.norm"):
            yield f"{prefix}.{norm}.weight", (hidden,), 1.0
        yield f"{prefix}.eh_proj.weight", (hidden, 2 * hidden), 1.0
        yield f"{prefix}.shared_head.head.weight", (vocab, hidden), _LOGIT_GAIN


def _layer(layer: int, config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...], float]]:
    hidden, prefix = config["hidden_size"], f"model.layers.{layer}"
    yield f"{prefix}.input_layernorm.weight", (hidden,), 1.0
    yield from _attention(f"{prefix}.self_attn", config)
    yield f"{prefix}.post_attention_layernorm.weight", (hidden,), 1.0
    if layer < config["first_k_dense_replace"]:
        yield from _mlp(f"{prefix}.mlp", hidden, config["intermediate_size"])
    else:
        yield from _moe(f"{prefix}.mlp", config)


def _attention(prefix: str, config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...], float]]:
    hidden, H = config["hidden_size"], config["num_attention_heads"]
    latent, rope = config["kv_lora_rank"], config["qk_rope_head_dim"]
    nope, v_dim, q_rank = config["qk_nope_head_dim"], config["v_head_dim"], config["q_lora_rank"]
    if q_rank is None:
        yield f"{prefix}.q_proj.weight", (H * (nope + rope), hidden), _QUERY_GAIN
    else:
        yield f"{prefix}.q_a_proj.weight", (q_rank, hidden), 1.0
        yield f"{prefix}.q_a_layernorm.weight", (q_rank,), 1.0
        yield f"{prefix}.q_b_proj.weight", (H * (nope + rope), q_rank), _QUERY_GAIN
    yield f"{prefix}.kv_a_proj_with_mqa.weight", (latent + rope, hidden), 1.0
    yield f"{prefix}.kv_a_layernorm.weight", (latent,), 1.0
    yield f"{prefix}.kv_b_proj.weight", (H * (nope + v_dim), latent), 1.0
    yield f"{prefix}.o_proj.weight", (hidden, H * v_dim), 1.0
    if "index_topk" in config:
        yield from _indexer(f"{prefix}.indexer", config)


def _indexer(prefix: str, config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...], float]]:
    hidden, width, heads = config["hidden_size"], config["index_head_dim"], config["index_n_heads"]
    yield f"{prefix}.wq_b.weight", (heads * width, config["q_lora_rank"]), 1.0
    yield f"{prefix}.wk.weight", (width, hidden), 1.0
    yield f"{prefix}.k_norm.weight", (width,), 1.0
    yield f"{prefix}.k_norm.bias", (width,), 1.0
    yield f"{prefix}.weights_proj.weight", (heads, hidden), 1.0


def _moe(prefix: str, config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...], float]]:
    hidden, width, E = (
        config["hidden_size"],
        config["moe_intermediate_size"],
        config["n_routed_experts"],
    )
    yield f"{prefix}.gate.weight", (E, hidden), 1.0
    if config["topk_method"] == "noaux_tc":
        yield f"{prefix}.gate.e_score_correction_bias", (E,), 1.0
    for expert in range(E):
        yield from _mlp(f"{prefix}.experts.{expert}", hidden, width)
    yield from _mlp(f"{prefix}.shared_experts", hidden, width * config["n_shared_experts"])


def _mlp(prefix: str, hidden: int, width: int) -> Iterator[tuple[str, tuple[int, ...], float]]:
    yield f"{prefix}.gate_proj.weight", (width, hidden), 1.0
    yield f"{prefix}.up_proj.weight", (width, hidden), 1.0
    yield f"{prefix}.down_proj.weight", (hidden, width), 1.0
