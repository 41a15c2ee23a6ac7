# SPDX-License-Identifier: Apache-2.0
"""Every environment variable this project reads, in one table.

`get(name)` parses the variable at the time of the call. `python -m mla_backend.envs` prints the
table as Markdown; docs/environment.md is that output, and a test keeps it current.
"""

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

PREFIX = "MLA_BACKEND_"

_TRUE = ("1", "true", "yes", "on")
_FALSE = ("0", "false", "no", "off")

_SERVICE = re.compile(
    r"\w+_(SERVICE_(HOST|PORT(_\w+)?)|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)"
)
_SERVICE_URL = re.compile(r"(tcp|udp|sctp)://")


def _parse_bool(text: str, besides: tuple[str, ...] = ()) -> bool:
    lowered = text.strip().lower()
    if lowered not in _TRUE + _FALSE:
        allowed = ", ".join((*besides, *_TRUE))
        raise ValueError(f"expected one of {allowed} or {', '.join(_FALSE)}")
    return lowered in _TRUE


def _choice(*allowed: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in allowed:
            raise ValueError(f"expected one of {', '.join(allowed)}")
        return text

    return parse


def _auto_or_count(most: int) -> Callable[[str], int | None]:
    def parse(text: str) -> int | None:
        if text == "auto":
            return None
        if not text.isdecimal() or int(text) > most:
            raise ValueError(f"expected one of auto or 0 to {most}")
        return int(text)

    return parse


def _auto_or_bool(text: str) -> bool | None:
    return None if text == "auto" else _parse_bool(text, besides=("auto",))


@dataclass(frozen=True)
class EnvVar:
    """One environment variable: `default` is the text that stands in when it is unset."""

    name: str
    default: str
    parse: Callable[[str], Any]
    doc: str


ENV_VARS: dict[str, EnvVar] = {
    var.name: var
    for var in (
        EnvVar(
            "MLA_BACKEND_IMPL",
            "auto",
            _choice("auto", "hopper", "triton", "torch", "reference"),
            "`hopper`, `triton`, `torch` or `reference`: implementation of the decode kernel, or "
            "of the kernels of a sparse model (`hopper`: of its attention). `auto` chooses by "
            "device and shape.",
        ),
        EnvVar(
            "MLA_BACKEND_RESCALE",
            "auto",
            _choice("auto", "pow2", "amla", "flash"),
            "Softmax rescaling of decode attention: `pow2` (power-of-two grid), `amla` (the "
            "paper's integer add) or `flash` (the usual multiply). `auto`: `pow2`, and on a CPU "
            "`flash`, which torch has an operator for. A sparse model takes `pow2`, on a CPU "
            "`flash` too; another is refused at start-up.",
        ),
        EnvVar(
            "MLA_BACKEND_FP8_QUERY",
            "0",
            _parse_bool,
            "With `--kv-cache-dtype fp8` on sm_90: round the queries of decode attention to e4m3 "
            "and multiply in fp8, as vLLM's FLASHMLA does. Queries and softmax weights then have 4 "
            "significant bits. Refused at start-up wherever it cannot be had.",
        ),
        EnvVar(
            "MLA_BACKEND_FP8_INDEXER",
            "auto",
            _auto_or_bool,
            "With sparse attention on sm_90: multiply the fp8 codes of the indexer's queries and "
            "keys themselves, as vLLM's DeepGEMM does. The sums then have some 14 bits, not 24: "
            "scores within 2e-4, in the norm. Faster for long prompts and drafts. `0`: exact "
            "products. `auto`: on sm_90, unless MLA_BACKEND_IMPL is another than `hopper`, but not "
            "in batch-invariant mode. Where it cannot be had, `1` is refused at start-up.",
        ),
        EnvVar(
            "MLA_BACKEND_EXTEND_TOKENS",
            "auto",
            _auto_or_count(512),
            "The end of a prompt whose rest is cached attends in absorbed form, like decode "
            "tokens, if it has at most so many tokens, 0 to 512. `auto`: twice the heads of a "
            "rank, with the Hopper kernel twice the rows of a piece (docs/plugin.md), at most 128; "
            "on a CPU three times the heads, at most 48; `0`, or `auto` in batch-invariant mode or "
            "under decode context parallelism: never. Refused at start-up are a number for a "
            "sparse model and one above 0 under decode context parallelism.",
        ),
        EnvVar(
            "MLA_BACKEND_EXPAND_PROMPTS",
            "auto",
            _auto_or_bool,
            "Prompts of a sparse model that see at most `index_topk` tokens attend in expanded "
            "form, like those of a dense one. `auto`: yes, but not in batch-invariant mode, nor "
            "where it cannot be had (docs/plugin.md), where `1` is refused at start-up.",
        ),
        EnvVar(
            "MLA_BACKEND_CHECK",
            "0",
            _parse_bool,
            "Check the lengths, block tables and write slots of every step of requests before it "
            "runs, and name the request at fault by its id and its place in the step; not of "
            "steps that vLLM makes up. Slow: it copies them off the device, and drafts are no "
            "longer one CUDA graph.",
        ),
        EnvVar(
            "MLA_BACKEND_CPU_PLATFORM",
            "1",
            _parse_bool,
            "Offer vLLM the CPU platform that can select this backend. `0` leaves vLLM's own CPU "
            "platform in place; `--attention-backend CUSTOM` then has no effect on a CPU.",
        ),
        EnvVar(
            "MLA_BACKEND_CPU_ROTARY_FIX",
            "1",
            _parse_bool,
            "On CPU, route rotary embedding around vLLM's compiled op, which is wrong for the 3-D "
            "query of MLA models.",
        ),
        EnvVar(
            "MLA_BACKEND_ALLOW_UNTESTED_VLLM",
            "0",
            _parse_bool,
            "Register with a vLLM outside the tested range instead of refusing.",
        ),
    )
}


def get(name: str, environ: Mapping[str, str] = os.environ) -> Any:
    """Parsed value of the environment variable `name`, or of its default when it is unset or empty
    (what "${NAME:-}" makes of an unset one).

    Raises KeyError for a name that is not in the table, ValueError for a value that does not
    parse (naming the variable, the value and what is allowed).
    """
    var = ENV_VARS[name]
    text = environ.get(name) or var.default
    try:
        return var.parse(text)
    except ValueError as error:
        raise ValueError(f"{name}={text!r}: {error}") from None


def of_a_service(name: str, value: str) -> bool:
    """Whether Kubernetes sets this variable, in every pod beside a Service: one that is called
    mla-backend or mla-serve has names like those of settings."""
    url = name.endswith("_PORT") and _SERVICE_URL.match(value) is not None
    return url or _SERVICE.fullmatch(name) is not None


def problems(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Variables that do not parse, and MLA_BACKEND_ ones that are none of ours, in words."""
    found = []
    for name in ENV_VARS:
        try:
            get(name, environ)
        except ValueError as error:
            found.append(str(error))
    return found + [
        f"{name} is no setting of ours"
        for name, value in environ.items()
        if name.startswith(PREFIX) and name not in ENV_VARS and not of_a_service(name, value)
    ]


def check_all() -> None:
    """ValueError with all `problems`: in a worker, or where vLLM asks for plugins, the error would
    be lost or drowned."""
    if found := problems():
        raise ValueError(f"{'; '.join(found)} (docs/environment.md lists the settings)")


def markdown_table() -> str:
    """The table as a Markdown page."""
    rows = [f"| `{v.name}` | `{v.default}` | {v.doc} |" for v in ENV_VARS.values()]
    head = (
        "# Environment variables\n\nWritten by `python -m mla_backend.envs`.\n\n"
        "Every option of `mla-backend serve` can also be given as `MLA_SERVE_<OPTION>`, such as "
        "`MLA_SERVE_MAX_MODEL_LEN`. Variables that Kubernetes makes of a Service with such a name "
        "are passed over.\n"
    )
    return "\n".join([head, "| name | default | meaning |", "|---|---|---|", *rows, ""])


if __name__ == "__main__":
    print(markdown_table(), end="")
