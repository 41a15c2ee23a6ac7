# SPDX-License-Identifier: Apache-2.0
"""MLA_BACKEND_FP8_INDEXER=1: what it needs, and the words where that is not there. Imports neither
vLLM nor torch.

The indexer's scores are then products of the e4m3 codes themselves, as DeepGEMM's are in vLLM's own
path. Hopper's tensor cores add those with some 14 bits, so tokens whose scores all but tie may be
chosen otherwise: it is the operator's choice alone.
"""

from typing import Any

from mla_backend import envs
from mla_backend.attention.fp8_query import lacking_hopper as lacking

VARIABLE = "MLA_BACKEND_FP8_INDEXER"
MEND = f"unset {VARIABLE}"
HINT = (
    f"The indexer's scores are exact. {VARIABLE}=1 makes those of prompts and drafts 1.5 to 1.7 "
    "times as fast: it adds the products as vLLM's DeepGEMM does, with some 14 bits."
)


def asked() -> bool:
    """Whether the operator set it."""
    return bool(envs.get(VARIABLE))


def reasons(config: dict[str, Any]) -> list[str]:
    """Why a layer cannot be served so; empty if it can, or if nobody asked. `config` is that of
    vLLM's `validate_configuration`."""
    if not asked():
        return []
    found = lacking(config["device_capability"], envs.get("MLA_BACKEND_IMPL"))
    if not config["use_sparse"]:
        found.append("DeepSeek Sparse Attention, not dense attention")
    return [f"{VARIABLE}=1 needs {what}. Mend: {MEND}" for what in found]
