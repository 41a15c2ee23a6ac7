# SPDX-License-Identifier: Apache-2.0
"""Where settings come from: command line over MLA_SERVE_* variables over a YAML file.

All three speak of the same options, vLLM's and ours. The YAML file is one that
`vllm serve --config` reads: keys are option names without the dashes. The variable
`MLA_SERVE_MAX_MODEL_LEN=4096` is the option `--max-model-len 4096`. Needs no vLLM: the model must
be known before vLLM is imported.
"""

import argparse
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ENV_PREFIX = "MLA_SERVE_"


@dataclass(frozen=True)
class Layers:
    """The three sources, weakest first. Keys are option names without dashes."""

    file: Mapping[str, Any]
    environment: Mapping[str, Any]
    command_line: tuple[str, ...]

    def model(self) -> str | None:
        """The model that the strongest source names, if any does.

        On the command line: the first argument, as vLLM's documentation writes it, or --model.
        """
        if self.command_line and not self.command_line[0].startswith("-"):
            return self.command_line[0]
        scan = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        scan.add_argument("--model")
        named = scan.parse_known_args(self.command_line)[0].model
        return named or self.environment.get("model") or self.file.get("model")

    def arguments(self, options: Collection[str]) -> list[str]:
        """One command line, weakest first: argparse takes the last of an option given twice.

        Raises ValueError for a variable or a key that names none of `options` ("--port", ...).
        """
        for source, prefix in ((self.environment, ENV_PREFIX), (self.file, "")):
            for key in source:
                if f"--{key.replace('_', '-')}" not in options:
                    name = prefix + key.upper().replace("-", "_") if prefix else key
                    raise ValueError(f"{name}: there is no option --{key}")
        weak = [*_flatten(self.file, options), *_flatten(self.environment, options)]
        # A positional after `--api-key a b` would be taken for one more key: it goes first.
        positional = int(bool(self.command_line) and not self.command_line[0].startswith("-"))
        head, rest = self.command_line[:positional], self.command_line[positional:]
        return [*head, *weak, *rest]


def read_layers(argv: list[str], environ: Mapping[str, str]) -> Layers:
    """The sources named by a command line (--config) and an environment (MLA_SERVE_CONFIG).

    Raises OSError for a config file that cannot be read, ValueError for one that is no mapping.
    """
    scan = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    scan.add_argument("--config")
    known, rest = scan.parse_known_args(argv)
    environment = {
        name.removeprefix(ENV_PREFIX).lower().replace("_", "-"): yaml.safe_load(value)
        for name, value in environ.items()
        if name.startswith(ENV_PREFIX)
    }
    path = known.config or environment.pop("config", None)
    environment.pop("config", None)
    content = yaml.safe_load(Path(path).read_text()) if path else None
    if content is not None and not isinstance(content, dict):
        raise ValueError(f"{path}: expected a mapping of option names to values")
    return Layers(content or {}, environment, tuple(rest))


def _flatten(mapping: Mapping[str, Any], options: Collection[str]) -> list[str]:
    """As `vllm serve --config` does it: true is a flag, a list several values, a mapping JSON."""
    arguments: list[str] = []
    for key, value in mapping.items():
        flag, negative = f"--{key}", f"--no-{key}"
        if isinstance(value, bool):
            if value:
                arguments.append(flag)
            elif negative in options:
                arguments.append(negative)
        elif isinstance(value, list):
            arguments += [flag, *map(str, value)] if value else []
        elif isinstance(value, dict):
            arguments += [flag, json.dumps(value)]
        else:
            arguments += [flag, str(value)]
    return arguments
