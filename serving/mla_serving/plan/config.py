# SPDX-License-Identifier: Apache-2.0
"""A model from its config.json."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from mla_kernels.layouts import MlaDims

from mla_serving.plan import checkpoint, other_models, quantization
from mla_serving.plan.model import MlaModel
from mla_serving.plan.other_models import EXPERTS, LONGCAT

# What vLLM's --dtype auto makes of a checkpoint's dtype.
_DTYPES = {"bfloat16": "bfloat16", "float16": "float16", "float32": "bfloat16"}
_MOST = 1_000_000_000  # of a width or a count
_MOST_LAYERS = 10_000
# Where a checkpoint says how it is quantised; the second is an older name, of compressed-tensors.
_QUANTISATION = ("quantization_config", "compression_config")
# Where a wrapper has its language model; the second is DeepSeek-VL2's.
_WRAPPED = ("text_config", "language_config")
# LongCat-Flash, whose checkpoints may have no model_type, and its names of what others have too.
_LONGCAT_ARCHITECTURE = "LongcatFlashForCausalLM"
_NAMES_OF_LONGCAT = {
    "num_layers": "num_hidden_layers",
    "ffn_hidden_size": "intermediate_size",
    "expert_ffn_hidden_size": "moe_intermediate_size",
}


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
    config = _renamed(name, config)
    longcat = config.get("model_type") == LONGCAT
    other_models.refuse(config, name)
    read = partial(_integer, name, config)
    layers = read("num_hidden_layers", most=_MOST_LAYERS)
    experts, index_topk = read(EXPERTS, 0, 0), read("index_topk", 0, 0)
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
        mtp_layers=0 if longcat else read("num_nextn_predict_layers", 0, 0, _MOST_LAYERS),
        twofold=longcat,
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
        zero_experts=read("zero_expert_num", 0, 0),
        router_bias=longcat or config.get("topk_method") == "noaux_tc",
        index_heads=read("index_n_heads") if index_topk else 0,
        index_dim=read("index_head_dim") if index_topk else 0,
        index_topk=index_topk,
        index_shared=_index_shared(name, config, range(layers)),
        dtype=dtype,
        scheme=scheme,
        plain_parts=_plain_parts(name, config) if longcat else (),
        kv_cache_dtype=kv_cache_dtype,
    )


def _renamed(name: str, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """LongCat-Flash's config with the names that others have; any other as it is."""
    kind, made_for = config.get("model_type"), config.get("architectures")
    if kind is None and made_for == [_LONGCAT_ARCHITECTURE]:
        kind = LONGCAT  # as vLLM takes it
    if kind != LONGCAT:
        return config
    lacks = [old for old in _NAMES_OF_LONGCAT if config.get(old) is None]
    if lacks:
        raise ValueError(f"{name}: config.json lacks {lacks[0]}")
    theirs = {new: config[old] for old, new in _NAMES_OF_LONGCAT.items()}
    return {**config, **theirs, "model_type": kind}


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


def _plain_parts(name: str, config: Mapping[str, Any]) -> tuple[str, ...]:
    """Parts of a layer that vLLM's LongCat model does not quantise."""
    said = config.get("disable_quant_module") or []
    if not isinstance(said, list):
        raise ValueError(f"{name}: expected a list as disable_quant_module, got {said!r}")
    return tuple(part for part in ("self_attn", "mlps") if part in said)


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
