# SPDX-License-Identifier: Apache-2.0
"""Whether products in fp8, where they are asked for, can be had here."""

from collections.abc import Callable, Sequence

from mla_backend import envs
from mla_backend.attention import fp8_query
from mla_backend.attention.sparse import fp8_indexer
from mla_backend.doctor.facts import Facts
from mla_backend.doctor.report import Result


def queries(facts: Facts) -> Result:
    """Judges devices and settings; the rest is known when an engine starts."""
    settings = ("MLA_BACKEND_IMPL", "MLA_BACKEND_RESCALE")
    done = "decode attention multiplies in fp8, of engines with --kv-cache-dtype fp8"
    return _judged(
        facts, "fp8 queries", fp8_query.VARIABLE, fp8_query.lacking, settings, fp8_query.MEND, done
    )


def indexer(facts: Facts) -> Result:
    """Likewise."""
    settings = ("MLA_BACKEND_IMPL",)
    done = "the indexer's scores are products in fp8, of engines with sparse attention"
    by_itself = (facts.environ.get(fp8_indexer.VARIABLE) or "auto") == "auto"
    if by_itself and facts.environ.get("VLLM_BATCH_INVARIANT", "0") != "0":
        return Result("fp8 indexer", "ok", "not in batch-invariant mode")
    return _judged(
        facts,
        "fp8 indexer",
        fp8_indexer.VARIABLE,
        fp8_indexer.lacking,
        settings,
        fp8_indexer.MEND,
        done,
    )


def _judged(
    facts: Facts,
    name: str,
    variable: str,
    lacking: Callable[..., list[str]],
    settings: Sequence[str],
    mend: str,
    done: str,
) -> Result:
    def setting(name: str) -> str:
        return facts.environ.get(name) or envs.ENV_VARS[name].default

    try:
        asked = envs.ENV_VARS[variable].parse(setting(variable))
    except ValueError:
        return Result(name, "fail", f"{variable} has no value", "see settings above")
    if asked is False:
        return Result(name, "ok", f"not asked for ({variable})")
    chosen = [setting(other) for other in settings]
    devices = [gpu["capability"] for gpu in facts.gpus] or [None]
    found = [what for device in devices for what in lacking(device, *chosen)]
    if found and asked is None:
        return Result(name, "ok", f"not here, which needs {'; '.join(dict.fromkeys(found))}")
    if found:
        needs = f"{variable}=1 needs {'; '.join(dict.fromkeys(found))}"
        return Result(name, "fail", needs, mend)
    return Result(name, "ok", done)
