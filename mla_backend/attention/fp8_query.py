# SPDX-License-Identifier: Apache-2.0
"""MLA_BACKEND_FP8_QUERY=1: what it needs, and the words where that is not there. Imports neither
vLLM nor torch.

vLLM then rounds the absorbed query of each layer to e4m3 with the layer's `_q_scale`, as it does
for its own FLASHMLA, and the kernel multiplies in fp8. It is the operator's choice alone: queries
and softmax weights keep 4 significant bits.
"""

from collections.abc import Sequence
from typing import Any

from mla_backend import envs

VARIABLE = "MLA_BACKEND_FP8_QUERY"
MEND = f"unset {VARIABLE}"
CAPABILITY = (9, 0)
# One scale for the whole cache.
KV_CACHE_DTYPES = ("fp8", "fp8_e4m3")
DTYPE = "bfloat16"
HEAD_SIZE = 576
CACHE = "float8_e4m3fn"  # what these are to the kernels
IMPLS = ("auto", "hopper")
RESCALES = ("auto", "pow2")
# Query rows of a request (heads times new tokens) from which they are faster, 1.1 to 1.5 times
# (benchmarks/results/h200/dense_decode.md).
PAYING_ROWS = 32


def asked() -> bool:
    """Whether the operator set it."""
    return bool(envs.get(VARIABLE))


def lacking(capability: Sequence[int] | None, impl: str, rescale: str) -> list[str]:
    """What it needs and this device or these settings are not; capability None: a CPU."""
    found = lacking_hopper(capability, impl)
    if rescale not in RESCALES:
        found.append(f"MLA_BACKEND_RESCALE of {' or '.join(RESCALES)}, not {rescale}")
    return found


def lacking_hopper(capability: Sequence[int] | None, impl: str) -> list[str]:
    """Likewise, of what only Hopper kernels do."""
    found = []
    if capability is None:
        found.append("an sm_90 GPU, not a CPU")
    elif tuple(capability) != CAPABILITY:
        found.append(f"an sm_90 GPU, not sm_{capability[0]}{capability[1]}")
    if impl not in IMPLS:
        found.append(f"MLA_BACKEND_IMPL of {' or '.join(IMPLS)}, not {impl}")
    return found


def hint(impl: str, kv_cache_dtype: str, query_dtype: str, rows: int) -> str:
    """For the log of an engine that could decode faster with them, dtypes as torch names them;
    "" for any other."""
    could = impl == "hopper" and kv_cache_dtype == CACHE and query_dtype == DTYPE
    if not could or rows < PAYING_ROWS:
        return ""
    return (
        f"This fp8 cache is read with queries of {DTYPE}. {VARIABLE}=1 decodes faster: it rounds "
        "them to fp8, as vLLM's FLASHMLA does."
    )


def reasons(config: dict[str, Any]) -> list[str]:
    """Why a layer cannot be served so; empty if it can, or if nobody asked. `config` is that of
    vLLM's `validate_configuration`."""
    if not asked():
        return []
    impl, rescale = envs.get("MLA_BACKEND_IMPL"), envs.get("MLA_BACKEND_RESCALE")
    found = lacking(config["device_capability"], impl, rescale)
    if config["kv_cache_dtype"] not in KV_CACHE_DTYPES:
        found.append(f"--kv-cache-dtype fp8, not {config['kv_cache_dtype']}")
    dtype = str(config["dtype"]).removeprefix("torch.")
    if dtype != DTYPE:
        found.append(f"model dtype {DTYPE}, not {dtype}")
    if config["head_size"] != HEAD_SIZE:
        found.append(f"a cache row of {HEAD_SIZE} elements, not {config['head_size']}")
    if config["use_sparse"]:
        found.append("dense attention, not DeepSeek Sparse Attention")
    return [f"{VARIABLE}=1 needs {what}. Mend: {MEND}" for what in found]
