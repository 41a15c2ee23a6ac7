# SPDX-License-Identifier: Apache-2.0
"""Types of arguments, so that a bad one is said before anything is measured."""

import difflib
import json
import math
import re
from argparse import ArgumentTypeError
from collections.abc import Iterable
from pathlib import Path
from typing import Any

_OBJECTIVES = ("ttft", "tpot", "e2el")
# Of a config.json: what benchmarks read of it.
_MLA_KEYS = (
    "kv_lora_rank",
    "num_attention_heads",
    "num_hidden_layers",
    "qk_rope_head_dim",
    "vocab_size",
)


def count(text: str) -> int:
    """How many of something, at least one."""
    return _whole(text, 1)


def length(text: str) -> int:
    """Of something that may be empty."""
    return _whole(text, 0)


def _whole(text: str, least: int) -> int:
    try:
        value = int(text)
    except ValueError:
        raise ArgumentTypeError(f"expected a whole number, {least} or more, got {text}") from None
    if value < least:
        raise ArgumentTypeError(f"expected {least} or more, got {value}")
    return value


def positive(text: str) -> float:
    """A number above 0."""
    value = _number(text)
    if not 0 < value < math.inf:
        raise ArgumentTypeError(f"expected a number above 0, got {text}")
    return value


def not_negative(text: str) -> float:
    """A number of 0 or more."""
    value = _number(text)
    if not 0 <= value < math.inf:
        raise ArgumentTypeError(f"expected 0 or more, got {text}")
    return value


def _number(text: str) -> float:
    """NaN where it is none, which no range has."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ArgumentTypeError(f"expected a JSON object, got {text!r}: {error}") from error
    if not isinstance(value, dict):
        raise ArgumentTypeError(f"expected a JSON object, got {text}")
    return value


def checkpoint(text: str) -> Path:
    """A folder with the configuration of a model with MLA."""
    if not (path := Path(text) / "config.json").is_file():
        raise ArgumentTypeError(f"expected a folder with a model, but there is no {path}")
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:  # not the text, which json_object repeats
        raise ArgumentTypeError(f"expected a JSON object in {path}: {error}") from error
    if not isinstance(config, dict):
        raise ArgumentTypeError(f"expected a JSON object in {path}, got {config!r:.40}")
    if lacking := [key for key in _MLA_KEYS if key not in config]:
        raise ArgumentTypeError(
            f"expected a model with multi-head latent attention, but {path} has no "
            f"{', '.join(lacking)}"
        )
    return Path(text)


def objectives(text: str) -> str:
    """Milliseconds as vLLM's load generator takes them, which says so only when it loads a server:
    "ttft:2000 tpot:50"; "" for none."""
    words = text.split()
    for word in words:
        name, _, milliseconds = word.partition(":")
        try:
            positive(milliseconds)
        except ArgumentTypeError:
            name = ""
        if name not in _OBJECTIVES:
            raise ArgumentTypeError(
                f"expected milliseconds of {', '.join(_OBJECTIVES)}, as in ttft:2000, got {word}"
            )
    return " ".join(words)


def matching(option: str, wanted: re.Pattern[str], names: Iterable[str]) -> list[str]:
    """The names in which `wanted`, what `option` was given, is found. SystemExit where there is
    none, with the names that are nearest to it."""
    names = list(names)
    if found := [name for name in names if wanted.search(name)]:
        return found
    text = wanted.pattern.strip("^$")
    nearest = difflib.get_close_matches(text, names, n=5, cutoff=0)
    raise SystemExit(
        f"nothing matches {option} {wanted.pattern}; expected a regular expression found in one of "
        f"{len(names)} names; the nearest: {', '.join(nearest)}"
    )


def pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise ArgumentTypeError(f"{text!r} is no regular expression: {error}") from error
