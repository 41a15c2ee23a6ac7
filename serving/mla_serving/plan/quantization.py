# SPDX-License-Identifier: Apache-2.0
"""How a checkpoint stores its linear layers, by the `quantization_config` of its config.json or the
file that `checkpoint.py` takes for it.

Known are the schemes of DeepSeek's releases (fp8), ModelOpt, AWQ, GPTQ and compressed-tensors.
"""

import fnmatch
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

_MOST = 65536  # of a group, or of a side of a block
# Layers that vLLM's DeepSeek model makes one of.
_JOINED = dict.fromkeys(("gate_proj", "up_proj"), "gate_up_proj")
_JOINED |= dict.fromkeys(("q_a_proj", "kv_a_proj_with_mqa"), "fused_qkv_a_proj")


@dataclass(frozen=True)
class Scheme:
    """bits        of one quantised weight with its share of scales and zero points; None: not told
    sides       of the blocks of weights that share a scale; empty: no such blocks
    skipped     patterns of the linear layers that are not quantised
    only        patterns of those that are; None: all others
    group       of weights along a matrix's input that share a scale; 1: no such groups
    vllm_names  whether the patterns are held against the names of vLLM's layers, where experts are
                one, and gate and up
    """

    bits: float | None
    sides: tuple[int, ...] = ()
    skipped: tuple[re.Pattern[str], ...] = ()
    only: tuple[re.Pattern[str], ...] | None = None
    group: int = 1
    vllm_names: bool = False

    def covers(self, module: str) -> bool:
        """Whether a linear layer, by its path in the checkpoint, is quantised."""
        experts = re.match(r".*\.experts(?=\.)", module)  # a list may name them as one
        names = [module, experts[0]] if experts else [module]
        if self.vllm_names:
            parent, _, last = module.rpartition(".")
            own = f"{parent}.{_JOINED.get(last, last)}"
            names = [experts[0]] if experts else [module, own]

        def found(patterns: Iterable[re.Pattern[str]]) -> bool:
            return any(pattern.match(name) for pattern in patterns for name in names)

        # Of experts vLLM does not ask then whether they are among `only`.
        only = None if self.vllm_names and experts else self.only
        return not found(self.skipped) and (only is None or found(only))


def read(config: Mapping[str, Any] | None, bits: float | None) -> Scheme | None:
    """The scheme of a `quantization_config`, with `bits` in place of its own if given; None: plain.

    ValueError for a size that neither of them tells and for keys that make no sense.
    """
    if not config:
        return None if bits is None else Scheme(bits)
    method = _method(config)
    reader = _READERS.get(method) if isinstance(method, str) else None
    scheme = reader(config) if reader else Scheme(None)
    if bits is not None:
        scheme = replace(scheme, bits=bits)
    if scheme.bits is None:
        raise ValueError(
            f"weights quantised by {method}, whose size config.json does not tell. "
            "Give --weight-bits, the mean of all linear layers, scales included"
        )
    return scheme


def kv_cache_dtype(config: Mapping[str, Any] | None) -> str | None:
    """What vLLM makes of the cache dtype "auto" by this config; None: it asks for none."""
    if not config or not str(_method(config)).startswith("modelopt"):
        return None
    scopes = (_mapping(config, "quantization"), config)
    keys = ("kv_cache_scheme", "kv_cache_quant_algo")
    said = [scope.get(key) for key in keys for scope in scopes]
    kind: Any = next(filter(None, said), None)
    if isinstance(kind, Mapping):
        bits = kind.get("num_bits") if kind.get("type") == "float" else None
        kind = "nvfp4" if bits == 4 else "fp8" if bits == 8 and kind.get("dynamic") is False else ""
    return {"fp8": "fp8_e4m3", "nvfp4": "nvfp4"}.get(str(kind).lower())


def _method(config: Mapping[str, Any]) -> Any:
    """Who quantised it. ModelOpt's own file names no quant_method."""
    producer = config.get("producer")
    named = isinstance(producer, Mapping) and producer.get("name") == "modelopt"
    said = config.get("quant_method")
    return "modelopt" if said is None and named else said


def _fp8(config: Mapping[str, Any]) -> Scheme:
    sides = _sides(config.get("weight_block_size"), "weight_block_size")
    bits = 8 + 32 / math.prod(sides) if sides else 8
    names = config.get("ignored_layers") or config.get("modules_to_not_convert")
    return Scheme(bits, sides, _patterns(names, _exact))


def _modelopt(config: Mapping[str, Any]) -> Scheme:
    inner = _mapping(config, "quantization") or config
    group = _integer(inner, "group_size") or 16
    nvfp4 = _grouped(4, group, 8)
    sizes = {"FP8": 8, "FP8_PER_CHANNEL_PER_TOKEN": 8, "MXFP8": _grouped(8, 32, 8)}
    sizes |= {"NVFP4": nvfp4, "W4A16_NVFP4": nvfp4, "FP8_PB_WO": 8 + 32 / 128**2}
    algorithm = str(inner.get("quant_algo")).upper()
    names = inner.get("exclude_modules") or inner.get("ignore")
    skipped = _patterns(names, _within, fnmatch.translate)
    sides = (128, 128) if algorithm == "FP8_PB_WO" else ()
    groups = {"NVFP4": group, "W4A16_NVFP4": group, "MXFP8": 32}
    return Scheme(sizes.get(algorithm), sides, skipped, group=groups.get(algorithm, 1))


def _awq(config: Mapping[str, Any]) -> Scheme:
    bits = _integer(config, "bits") or _integer(config, "w_bit")
    group = _integer(config, "group_size") or _integer(config, "q_group_size")
    zero = bits if config.get("zero_point") else 0
    skipped = _patterns(config.get("modules_to_not_convert"), _within)
    size = _grouped(bits, group, 16, zero)
    return Scheme(size, skipped=skipped, group=group or 1, vllm_names=True)


def _gptq(config: Mapping[str, Any]) -> Scheme:
    bits = _integer(config, "bits")
    rules = _mapping(config, "dynamic")  # "-:" skips a layer, others change its bits
    skipped = [f"re:{rule[2:]}" for rule in rules if rule.startswith("-:")]
    if len(skipped) < len(rules):
        return Scheme(None)
    names = config.get("modules_in_block_to_quantize")
    if isinstance(names, list):  # also of lists, one for each step
        names = [x for item in names for x in (item if isinstance(item, list) else [item])]
    only = _patterns(names, _within) or None
    group = _integer(config, "group_size")
    size = _grouped(bits, group, 16, bits)
    patterns = _patterns(skipped, _exact)
    return Scheme(size, skipped=patterns, only=only, group=group or 1, vllm_names=True)


def _compressed_tensors(config: Mapping[str, Any]) -> Scheme:
    groups = [group for group in _mapping(config, "config_groups").values() if group]
    sizes: set[float | None] = set()
    targets: list[str] = []
    sides: tuple[int, ...] = ()
    shared = 1
    for group in groups:
        weights = _mapping(group, "weights")
        sides = _sides(weights.get("block_structure"), "block_structure")
        bits, floats = _integer(weights, "num_bits"), weights.get("type") == "float"
        zero = 0 if weights.get("symmetric", True) else bits
        if sides and bits:
            sizes.add(bits + 32 / math.prod(sides))
        else:
            shared = _integer(weights, "group_size") or 1
            sizes.add(_grouped(bits, shared if shared > 1 else None, 8 if floats else 16, zero))
        targets += _names(group.get("targets"))
    skipped = _patterns(config.get("ignore"), _exact)
    by_class = {x for x in targets if not x.startswith("re:") and "." not in x}
    if len(sizes) != 1 or not targets or by_class - {"Linear"}:
        return Scheme(None, skipped=skipped)
    only = None if by_class else _patterns(targets, _exact)
    return Scheme(sizes.pop(), sides, skipped, only, group=1 if sides else shared)


_READERS = {
    "fp8": _fp8,
    "deepseek_fp8": _fp8,
    "modelopt": _modelopt,
    "modelopt_fp4": _modelopt,
    "awq": _awq,
    "gptq": _gptq,
    "compressed-tensors": _compressed_tensors,
}


def _grouped(bits: int | None, group: int | None, scale: int, zero: int | None = 0) -> float | None:
    """`bits` of a weight, and of a scale and a zero point those that `group` weights share."""
    return bits + (scale + (zero or 0)) / group if bits and group else bits


def _integer(config: Mapping[str, Any], key: str) -> int | None:
    """None without the key, and for the -1 that says "no groups"."""
    value = config.get(key)
    if value in (None, -1):
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _MOST:
        raise ValueError(f"expected {key} of 1 to {_MOST} in quantization_config, got {value!r}")
    return value


def _mapping(config: Any, key: str) -> Mapping[str, Any]:
    value = (config.get(key) if isinstance(config, Mapping) else config) or {}
    if not isinstance(value, Mapping):
        raise ValueError(f"expected a mapping as {key} in quantization_config, got {value!r}")
    return value


def _sides(block: Any, key: str) -> tuple[int, ...]:
    """Sides of the blocks of weights that share a scale; empty without such."""
    if block is None:
        return ()
    whole = isinstance(block, list) and all(type(side) is int and side > 0 for side in block)
    if not whole or len(block) != 2 or max(block) > _MOST:
        raise ValueError(f"expected {key} of two integers of 1 to {_MOST}, got {block!r}")
    return tuple(block)


def _names(value: Any) -> list[str]:
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise ValueError(f"expected a list of layers in quantization_config, got {value!r}")
    return value


def _patterns(names: Any, *forms: Callable[[str], str]) -> tuple[re.Pattern[str], ...]:
    """Of a list of layers: each name in each of `forms`, or the pattern that it has after "re:".

    vLLM loads a model inside a wrapper by the same names without "language_model.".
    """
    plain = [name.replace("language_model.", "") for name in _names(names)]
    texts = [name[3:] if name.startswith("re:") else form(name) for name in plain for form in forms]
    try:
        return tuple(map(re.compile, texts))
    except re.error as error:
        raise ValueError(f"{error} in a pattern of quantization_config") from None


def _exact(name: str) -> str:
    return re.escape(name) + r"\Z"


def _within(name: str) -> str:
    return ".*" + re.escape(name)
