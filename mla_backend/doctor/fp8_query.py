# SPDX-License-Identifier: Apache-2.0
"""Whether fp8 queries, where they are asked for, can be had here."""

from mla_backend import envs
from mla_backend.attention import fp8_query
from mla_backend.doctor.facts import Facts
from mla_backend.doctor.report import Result

_NAME = "fp8 queries"


def asked_for(facts: Facts) -> Result:
    """Judges devices and settings; the rest is known when an engine starts."""

    def setting(name: str) -> str:
        return facts.environ.get(name) or envs.ENV_VARS[name].default

    try:
        asked = envs.ENV_VARS[fp8_query.VARIABLE].parse(setting(fp8_query.VARIABLE))
    except ValueError:
        return Result(_NAME, "fail", f"{fp8_query.VARIABLE} has no value", "see settings above")
    if not asked:
        return Result(_NAME, "ok", f"not asked for ({fp8_query.VARIABLE})")
    chosen = setting("MLA_BACKEND_IMPL"), setting("MLA_BACKEND_RESCALE")
    devices = [gpu["capability"] for gpu in facts.gpus] or [None]
    lacking = [what for device in devices for what in fp8_query.lacking(device, *chosen)]
    if lacking:
        found = f"{fp8_query.VARIABLE}=1 needs {'; '.join(dict.fromkeys(lacking))}"
        return Result(_NAME, "fail", found, fp8_query.MEND)
    return Result(
        _NAME, "ok", "decode attention multiplies in fp8, of engines with --kv-cache-dtype fp8"
    )
