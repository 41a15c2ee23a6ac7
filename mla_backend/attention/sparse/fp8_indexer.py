# SPDX-License-Identifier: Apache-2.0
"""MLA_BACKEND_FP8_INDEXER: what it needs, and the words where that is asked for and not there.
Imports neither vLLM nor torch.

The indexer's scores are then products of the e4m3 codes themselves, as DeepGEMM's are in vLLM's own
path. Hopper's tensor cores add those with some 14 bits, so tokens whose scores all but tie may be
chosen otherwise, as in vLLM's.

No other kernel multiplies so. That the cache is as the Hopper one needs it (contiguous, aligned to
16 bytes) is taken for granted here, as in vLLM 0.26 and 0.33, which have run; else a step raises.
"""

from collections.abc import Sequence
from typing import Any

from mla_backend import envs
from mla_backend.attention.fp8_query import lacking_hopper as lacking

VARIABLE = "MLA_BACKEND_FP8_INDEXER"
MEND = f"unset {VARIABLE}"


def is_on(capability: Sequence[int] | None, impl: str, *, deterministic: bool) -> bool:
    """Whether an engine's indexer multiplies so; `auto` is where it can, except in batch-invariant
    mode, which has run with exact products alone. capability None: a CPU."""
    asked: bool | None = envs.get(VARIABLE)
    return not (deterministic or lacking(capability, impl)) if asked is None else asked


def reasons(config: dict[str, Any]) -> list[str]:
    """Why a layer cannot be served so; empty if it can, or if nobody asked. `config` is that of
    vLLM's `validate_configuration`."""
    if not envs.get(VARIABLE):
        return []
    found = lacking(config["device_capability"], envs.get("MLA_BACKEND_IMPL"))
    if not config["use_sparse"]:
        found.append("DeepSeek Sparse Attention, not dense attention")
    return [f"{VARIABLE}=1 needs {what}. Mend: {MEND}" for what in found]
