# SPDX-License-Identifier: Apache-2.0
"""MLA_BACKEND_FP8_INDEXER=1: what it needs, and the words where that is not there. Imports neither
vLLM nor torch.

The indexer's scores are then products of the e4m3 codes themselves, as DeepGEMM's are in vLLM's own
path. Hopper's tensor cores add those with some 14 bits, so tokens whose scores all but tie may be
chosen otherwise: it is the operator's choice alone.
"""

from collections.abc import Sequence
from typing import Any

from mla_backend import envs

VARIABLE = "MLA_BACKEND_FP8_INDEXER"
MEND = f"unset {VARIABLE}"
CAPABILITY = (9, 0)
IMPLS = ("auto", "hopper")
HINT = (
    f"The indexer's scores are exact. {VARIABLE}=1 takes two thirds of their time for long prompts "
    "and drafts: it adds the products as vLLM's DeepGEMM does, with some 14 bits."
)


def asked() -> bool:
    """Whether the operator set it."""
    return bool(envs.get(VARIABLE))


def lacking(capability: Sequence[int] | None, impl: str) -> list[str]:
    """What it needs and this device or this setting is not; capability None: a CPU."""
    found = []
    if capability is None:
        found.append("an sm_90 GPU, not a CPU")
    elif tuple(capability) != CAPABILITY:
        found.append(f"an sm_90 GPU, not sm_{capability[0]}{capability[1]}")
    if impl not in IMPLS:
        found.append(f"MLA_BACKEND_IMPL of {' or '.join(IMPLS)}, not {impl}")
    return found


def reasons(config: dict[str, Any]) -> list[str]:
    """Why a layer cannot be served so; empty if it can, or if nobody asked. `config` is that of
    vLLM's `validate_configuration`."""
    if not asked():
        return []
    found = lacking(config["device_capability"], envs.get("MLA_BACKEND_IMPL"))
    if not config["use_sparse"]:
        found.append("DeepSeek Sparse Attention, not dense attention")
    return [f"{VARIABLE}=1 needs {what}. Mend: {MEND}" for what in found]
