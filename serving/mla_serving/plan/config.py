# SPDX-License-Identifier: Apache-2.0
"""A model from its config.json, and those of which the plan would be wrong."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from mla_kernels.layouts import MlaDims

from mla_serving.plan import checkpoint, quantization
from mla_serving.plan.model import MlaModel

# What vLLM's --dtype auto makes of a checkpoint's dtype.
_DTYPES = {"bfloat16": "bfloat16", "float16": "float16", "float32": "bfloat16"}
_MOST = 1_000_000_000  # of a width or a count
_MOST_LAYERS = 10_000
# Keys of models whose other layers are linear attention (Kimi Linear, Ling 2.5).
_HYBRID = ("linear_attn_config", "layer_group_size")
# Where a checkpoint says how it is quantised; the second is an older name, of compressed-tensors.
_QUANTISATION = ("quantization_config", "compression_config")
# Where a wrapper has its language model; the second is DeepSeek-VL2's.
_WRAPPED = ("text_config", "language_config")
# Keys of models with experts; how many is read as vLLM's DeepSeek model reads it.
_EXPERTS = "n_routed_experts"
_OF_EXPERTS = ("num_experts", "num_local_experts", "moe_intermediate_size")
# What transformers fills in where a config of these types has no such key, with the numbers of
# DeepSeek's own models; null is none.
_FILLED = ("q_lora_rank", _EXPERTS, "n_shared_experts", "first_k_dense_replace")
_FILLING = ("deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2")


def load(model: str, weight_bits: float | None = None) -> MlaModel:
    """The model at `model`: a config.json, a directory with one, or a name on the Hugging Face Hub.

    weight_bits  bits of one quantised weight, scales included, where config.json does not tell

    OSError if there is no such config, ValueError if it describes no MLA model.
    """
    config, name = checkpoint.read(model)
    return from_config(config, name, weight_bits)


def from_config(config: Mapping[str, Any], name: str, weight_bits: float | None = None) -> MlaModel:
    """`config`: the content of config.json, of a model or of a wrapper around one; as its
    quantization_config also that of the file that older ModelOpts write beside it."""
    outer = config
    key = next(filter(config.get, _WRAPPED), None)
    config = config[key] if key else config
    if not isinstance(config, Mapping):
        raise ValueError(f"{name}: expected a mapping as {key}, got {config!r}")
    _refuse_other_models(config, name)
    read = partial(_integer, name, config)
    layers = read("num_hidden_layers", most=_MOST_LAYERS)
    experts, index_topk = read(_EXPERTS, 0, 0), read("index_topk", 0, 0)
    said = [scope.get(key) for scope in (outer, config) for key in ("dtype", "torch_dtype")]
    dtype = str(next(filter(None, said), "bfloat16"))
    if dtype not in _DTYPES:
        raise ValueError(f"{name}: expected a dtype in {list(_DTYPES)}, got {dtype}")
    dtype = _DTYPES[dtype]
    said = [scope.get(key) for scope in (outer, config) for key in _QUANTISATION]
    quantisation = next(filter(None, said), None)
    if quantisation is not None and not isinstance(quantisation, Mapping):
        raise ValueError(f"{name}: expected a mapping as quantization_config, got {quantisation!r}")
    try:
        scheme = quantization.read(quantisation, weight_bits)
        kv_cache_dtype = quantization.kv_cache_dtype(quantisation) or dtype
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    return MlaModel(
        name=name,
        model_type=str(config.get("model_type")),
        hidden=read("hidden_size"),
        layers=layers,
        heads=read("num_attention_heads"),
        q_lora_rank=read("q_lora_rank", 1, 0) or None,
        dims=MlaDims(read("kv_lora_rank"), read("qk_rope_head_dim", 0)),
        nope=read("qk_nope_head_dim"),
        v=read("v_head_dim"),
        vocab=read("vocab_size"),
        tied=bool(config.get("tie_word_embeddings", False)),
        max_context=read("max_position_embeddings", 1, 0),
        dense_width=read("intermediate_size"),
        dense_layers=read("first_k_dense_replace", 0, 0),
        moe_layer_freq=read("moe_layer_freq", 1, 1),
        experts=experts,
        expert_width=read("moe_intermediate_size") if experts else 0,
        shared_experts=read("n_shared_experts", 0, 0),
        router_bias=config.get("topk_method") == "noaux_tc",
        index_heads=read("index_n_heads") if index_topk else 0,
        index_dim=read("index_head_dim") if index_topk else 0,
        index_topk=index_topk,
        index_shared=_index_shared(name, config, range(layers)),
        dtype=dtype,
        scheme=scheme,
        kv_cache_dtype=kv_cache_dtype,
    )


def _refuse_other_models(config: Mapping[str, Any], name: str) -> None:
    """ValueError for a model of which the plan would be wrong."""
    if config.get("kv_lora_rank") is None:
        raise ValueError(f"{name} has no kv_lora_rank: it does not use multi-head latent attention")
    if config.get("num_hidden_layers") is None and config.get("num_layers") is not None:
        raise ValueError(
            f"{name}: config.json has num_layers for num_hidden_layers, as that of LongCat, whose "
            "layers have two attentions and two dense MLPs each: the plan does not count those"
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
    absent = [key for key in _FILLED if key not in config]
    if absent and config.get("model_type") in _FILLING:
        raise ValueError(
            f"{name}: config.json lacks {absent[0]}, for which vLLM takes that of DeepSeek's own "
            "model: expected a number, or null for none"
        )
    # Of a model whose experts have another name a dense one would be planned, far too small.
    others = [key for key in _OF_EXPERTS if config.get(key) not in (None, 0)]
    if others and config.get(_EXPERTS) is None:
        raise ValueError(
            f"{name}: config.json has {others[0]} but no {_EXPERTS}: expected the number of "
            f"experts as {_EXPERTS}, 0 if it has none"
        )


def _refused_part(config: Mapping[str, Any]) -> str | None:
    """What of a model the backend refuses, beside the sizes that `served.py` checks."""
    kind = config.get("model_type")
    if config.get("learnable_sink", kind == "hy_v4"):
        return "learnable attention sinks"
    if config.get("index_kpool") not in (None, 1):
        return f"index_kpool {config['index_kpool']!r}"
    return "model_type dots3_note" if kind == "dots3_note" else None


def _integer(
    name: str,
    config: Mapping[str, Any],
    key: str,
    low: int = 1,
    absent: int | None = None,
    most: int = _MOST,
) -> int:
    """config[key], of `low` to `most`. Without the key, or with null, `absent`; None: required."""
    value = config.get(key)
    if value is None:
        if absent is None:
            raise ValueError(f"{name}: config.json lacks {key}")
        return absent
    if not isinstance(value, int) or isinstance(value, bool) or value < low:
        raise ValueError(f"{name}: expected {key} an integer of {low} or more, got {value!r}")
    if value > most:
        raise ValueError(f"{name}: expected {key} an integer of up to {most}, got {value}")
    return value


def _index_shared(name: str, config: Mapping[str, Any], layers: range) -> frozenset[int]:
    """Layers without an indexer of their own, as vLLM's DeepSeek model reads the config."""
    read = partial(_integer, name, config)
    pattern = config.get("index_topk_pattern")
    if pattern is not None:
        if not isinstance(pattern, (str, list)):
            raise ValueError(
                f"{name}: expected a letter for each layer as index_topk_pattern, got {pattern!r}"
            )
        return frozenset(i for i, kind in zip(layers, pattern, strict=False) if kind == "S")
    every, offset = read("index_topk_freq", 1, 1), read("index_skip_topk_offset", 0, 2)
    return frozenset(i for i in layers if max(i - offset + 1, 0) % every)
