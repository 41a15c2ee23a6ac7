# SPDX-License-Identifier: Apache-2.0
"""Where settings come from: command line over MLA_SERVE_* variables over a YAML file.

All three speak of the same options, vLLM's and ours. The YAML file is one that
`vllm serve --config` reads: keys are option names without the dashes. The variable
`MLA_SERVE_MAX_MODEL_LEN=4096` is the option `--max-model-len 4096`. A flag's variable says true or
false; other values are taken as they are written, but for lists and mappings, in JSON or YAML.
Needs no vLLM: the model must be known before vLLM is imported.
"""

import argparse
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from mla_backend.envs import of_a_service

ENV_PREFIX = "MLA_SERVE_"
# org/name, by itself, behind --option= or as a string within JSON.
_HUB_NAME = re.compile(r'(?:^|[="])(\w[\w.-]*/\w[\w.-]*)(?=$|")')
# Else an open server, and the demo model. Others that are empty in the file are left out.
_NEVER_EMPTY = ("api-key", "model")
_FLAG_WORDS = {"true": True, "yes": True, "on": True, "1": True}
_FLAG_WORDS |= {"false": False, "no": False, "off": False, "0": False}


def looks_like_a_model(text: str) -> bool:
    """Whether it is a folder that is there, or may be a name of the Hub."""
    there = os.path.isdir(text)  # noqa: PTH112 - to Path one that is too long is an error
    return there or _HUB_NAME.fullmatch(text) is not None


@dataclass(frozen=True)
class Settings:
    """The three sources, weakest first. Keys are option names without dashes."""

    file: Mapping[str, Any]
    environment: Mapping[str, str]
    command_line: tuple[str, ...]

    def model(self) -> str | None:
        """The model that the strongest source names, if any does.

        On the command line: the first argument, as vLLM's documentation writes it, or --model.
        """
        if self.command_line and not self.command_line[0].startswith("-"):
            return self.command_line[0]
        values = _scan("--model", self.command_line)[0]
        named = (values and values[-1]) or self.environment.get("model")
        if named is None and self.file.get("model") is not None:
            named = str(self.file["model"])
        return named

    def names(self, option: str) -> bool:
        """Whether any source has it: its name without dashes in front."""
        given = [word.removeprefix("--").partition("=")[0] for word in self.command_line]
        keys = [*given, *map(str, self.file), *self.environment]
        return option in (key.replace("_", "-") for key in keys)

    def is_local(self) -> bool:
        """Whether all that is named (model, tokenizer, draft, adapters) is on this machine.

        Without vLLM's parser it is not known which words are names, so whatever looks like one of
        the Hub counts, unless it is a path. The demo model, where none is named, is local.
        """
        said = [
            *self.command_line,
            *self.environment.values(),
            json.dumps(dict(self.file), default=str),
        ]
        named = {name for text in said for name in _HUB_NAME.findall(text)}
        model = self.model()
        local = model is None or Path(model).is_dir()
        return local and all(Path(name).exists() for name in named)

    def arguments(self, options: Mapping[str, argparse.Action]) -> list[str]:
        """One command line, weakest first: argparse takes the last of an option given twice.

        Raises ValueError for a variable or a key that names none of `options` ("--port", ...), or
        whose value is not of its kind.
        """
        said: list[tuple[argparse.Action, list[str]]] = []
        for key, value in self.file.items():
            words = _flatten(str(key), str(key), value, options)
            said.append((options[_flag(str(key))], words))
        # vLLM puts what has dots behind all else, where it would override these.
        whole = [options.get(f"--{key}") for key in self.environment]
        given = [word for word in self.command_line if word.startswith("-")]
        whole += [options.get(word.partition("=")[0].replace("_", "-")) for word in given]
        said = [(of, words) for of, words in said if not (_has_dots(words) and of in whole)]
        for key, text in self.environment.items():
            name = ENV_PREFIX + key.upper().replace("-", "_")
            action = options.get(f"--{key}")
            value = _typed(name, text, action)
            words = _flatten(name, key, value, options)
            if not words and isinstance(value, list):  # which would not undo what the file says
                raise ValueError(f"{name}: it is empty; leave it out")
            if value is False and not words:  # nor has the option a word that would
                said = [(of, words) for of, words in said if of is not action]
            said.append((options[f"--{key}"], words))
        weak = [word for _, words in said for word in words]
        # A positional after `--api-key a b` would be taken for one more key: it goes first.
        positional = int(bool(self.command_line) and not self.command_line[0].startswith("-"))
        head, rest = self.command_line[:positional], self.command_line[positional:]
        return [*head, *weak, *rest]


def read_settings(argv: list[str], environ: Mapping[str, str]) -> Settings:
    """The sources named by a command line (--config) and an environment (MLA_SERVE_CONFIG).

    Raises OSError for a config file that cannot be read, ValueError for one that is no mapping or
    has an empty name.
    """
    named, rest = _scan("--config", argv)
    if len(named) > 1:
        raise ValueError(f"expected one --config, got {', '.join(named)}")
    environment = {
        name.removeprefix(ENV_PREFIX).lower().replace("_", "-"): value
        for name, value in environ.items()
        if name.startswith(ENV_PREFIX) and not of_a_service(name, value)
    }
    in_environment = environment.pop("config", None)
    path = named[0] if named else in_environment
    if path == "":  # a shell's "$VARIABLE" that is not set
        raise ValueError("--config (MLA_SERVE_CONFIG) is empty; to serve without one leave it out")
    content = _read_yaml(path) if path else None
    if content is not None and not isinstance(content, dict):
        raise ValueError(f"{path}: expected a mapping of option names to values")
    return Settings(content or {}, environment, tuple(rest))


def _scan(option: str, argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """The values of one option, and the arguments without it."""
    scan = argparse.ArgumentParser("mla-backend serve", add_help=False, allow_abbrev=False)
    scan.add_argument(option, dest="values", action="append", default=[])
    known, rest = scan.parse_known_args(argv)
    return known.values, rest


def _read_yaml(path: str) -> Any:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8: {error}") from None
    return _yaml(path, text)


def _yaml(source: str, text: str, secret: bool = False) -> Any:
    """secret: the text may be a key, which an error must not repeat."""
    try:
        return yaml.load(text, _Loader)
    except (yaml.YAMLError, ValueError, KeyError, TypeError) as error:  # of !!float x, !!bool x
        what = getattr(error, "problem", None) or "no YAML" if secret else error
        raise ValueError(f"{source}: {what}") from None


class _Loader(yaml.SafeLoader):
    """A date stays the text that it is written as: JSON has none, and 2026-02-30 is an error. So
    does what is a number to YAML alone, or another one (0123, 0x1F, 12:30:00, 1_000): a key may
    look so."""


# What remains of YAML's forms; None: nothing does.
_FORMS = {
    "tag:yaml.org,2002:timestamp": None,
    "tag:yaml.org,2002:int": re.compile(r"(?:0|-?[1-9][0-9]*)$"),
    "tag:yaml.org,2002:float": re.compile(
        r"(?:(?:-?(?:0|[1-9][0-9]*)\.[0-9]*|\.[0-9]+)(?:[eE][-+][0-9]+)?"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
    ),
}


class _Written(float):
    """A number that is written as it was: it may be a key, or a name."""

    text: str

    @classmethod
    def of(cls, text: str, value: float | None = None) -> "_Written":
        number = cls(text if value is None else value)
        number.text = text
        return number

    def __str__(self) -> str:
        return self.text


def _written(loader: _Loader, node: yaml.ScalarNode) -> _Written:
    return _Written.of(str(loader.construct_scalar(node)), loader.construct_yaml_float(node))


_Loader.add_constructor("tag:yaml.org,2002:float", _written)
_Loader.yaml_implicit_resolvers = {
    first: [(tag, left) for tag, form in known if (left := _FORMS.get(tag, form)) is not None]
    for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def _typed(name: str, text: str, action: argparse.Action | None) -> Any:
    """The value of a variable. Only what must be is read as YAML, which takes 010 for 8, and the
    1e-6 of JSON for text."""
    if action is not None and action.nargs == 0:
        return _FLAG_WORDS.get(text.strip().lower(), text)
    if not text.lstrip().startswith(("[", "{")):
        return text
    try:
        return json.loads(text, parse_float=_Written.of)
    except ValueError:
        return _yaml(name, text, secret=True)


def _flag(key: str) -> str:
    """The option of a key, which may name one of the option's own."""
    return "--" + key.partition(".")[0].replace("_", "-")


def _has_dots(words: list[str]) -> bool:
    return bool(words) and "." in words[0].partition("=")[0]


def _flatten(name: str, key: str, value: Any, options: Mapping[str, argparse.Action]) -> list[str]:
    """As `vllm serve --config` does it: true is a flag, a list several values, a mapping JSON. A
    list for an option of one value, which vLLM would cut up, is JSON too (--allowed-origins), or
    the option again and again (--middleware). A dotted key is one of an option's JSON, as on the
    command line (--attention-config.backend)."""
    key, dot, inner = key.partition(".")
    key = key.replace("_", "-")  # as vLLM's parser does
    flag, negative = f"--{key}", f"--no-{key}"
    action = options.get(flag)
    if action is None:
        raise ValueError(f"{name}: there is no option {flag}{dot}{inner}")
    if dot:
        if value is None:
            raise ValueError(f"{name}: it is empty; leave it out")
        return [f"{flag}.{inner}={_word(value)}"]
    is_flag = action.nargs == 0
    if is_flag != isinstance(value, bool) and (is_flag or value is False):
        expected = "true or false" if is_flag else "a value"
        raise ValueError(f"{name}: expected {expected}, got {value}")
    if isinstance(value, bool):
        return [flag] if value else [negative] if negative in options else []
    again = isinstance(action, argparse._AppendAction)
    values = value if isinstance(value, list) and (again or action.nargs) else [value]
    empty = value is None or values == []
    if empty and key not in _NEVER_EMPTY:
        return []
    if empty or None in values:  # which would be the name "None"
        raise ValueError(f"{name}: it is empty; leave it out")
    if any(isinstance(item, bool) for item in values):
        raise ValueError(f"{name}: YAML takes a value for true or false; write it in quotes")
    words = list(map(_word, values))
    if again and isinstance(value, list):
        return [argument for word in words for argument in (flag, word)]
    if len(words) == 1 and words[0].startswith("-"):  # by itself argparse takes it for an option
        return [f"{flag}={words[0]}"]
    if any(word.startswith("-") for word in words):  # which may be a key: not repeated
        raise ValueError(f"{name}: expected several values none of which begins with a dash")
    return [flag, *words]


def _word(value: Any) -> str:
    return json.dumps(value) if isinstance(value, (bool, dict, list)) else str(value)
