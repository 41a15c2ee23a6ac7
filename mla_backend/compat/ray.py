# SPDX-License-Identifier: Apache-2.0
"""What Ray's workers are started with."""

import os

from mla_backend import envs

# Prefixes of variables that vLLM's Ray executors copy, beside its own; separated by commas.
_PREFIXES = "VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY"


def share_settings_with_ray() -> None:
    """Let the workers of a Ray cluster have our settings, if there are any.

    Ray starts them without the server's environment, and vLLM copies variables of its own and few
    others: `MLA_BACKEND_FP8_QUERY=1` would hold in the server alone, and nothing would say so.
    """
    if envs.ENV_VARS.keys().isdisjoint(os.environ):
        return
    asked = os.environ.get(_PREFIXES, "")
    if envs.PREFIX not in (prefix.strip() for prefix in asked.split(",")):
        os.environ[_PREFIXES] = f"{asked},{envs.PREFIX}" if asked else envs.PREFIX
