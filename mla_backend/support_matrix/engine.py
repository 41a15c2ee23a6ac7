# SPDX-License-Identifier: Apache-2.0
"""What vLLM may ask of the backend: the answers of `validate_configuration`, on a CPU and a GPU."""

import inspect
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.attention.selector import AttentionSelectorConfig

from mla_backend import compat, envs
from mla_backend.attention import fp8_query, support
from mla_backend.attention.backend import MlaBackend
from mla_backend.attention.sparse import fp8_indexer
from mla_backend.attention.sparse.backend import SparseMlaBackend
from mla_backend.support_matrix.table import table, yes

_GPU = DeviceCapability(9, 0)
_FP8_QUERY = ((fp8_query.VARIABLE, "1"),)
_CPU_NAME, _GPU_NAME = "CPU", "NVIDIA GPU"


class Asked(NamedTuple):
    """One thing that vLLM may ask for: `changes` to the configuration of a DeepSeek-V3 layer."""

    what: str
    changes: dict[str, Any]
    env: tuple[tuple[str, str], ...] = ()
    gpu: DeviceCapability = _GPU


def _features() -> list[Asked]:
    rows = [*support.HEAD_SIZES.items(), (512, "another size")]
    return [
        *(Asked(f"model dtype {name}", {"dtype": getattr(torch, name)}) for name in support.DTYPES),
        *(Asked(f"KV cache dtype {name}", _cache(name)) for name in support.KV_CACHE_DTYPES),
        Asked("KV cache dtype fp8_e5m2, or any other", _cache("fp8_e5m2")),
        *(Asked(f"cache row of {n} elements ({parts})", {"head_size": n}) for n, parts in rows),
        *(Asked(f"block size {size}", {"block_size": size}) for size in (16, 64, 128)),
        Asked("DeepSeek Sparse Attention (V3.2)", {"use_sparse": True}),
        Asked(
            "DeepSeek Sparse Attention (V3.2), a GPU of 8.0 or 8.6, vLLM 0.29 and later",
            {"use_sparse": True},
            gpu=DeviceCapability(8, 6),
        ),
        *(
            Asked(f"sparse attention, KV cache dtype {name}", {"use_sparse": True} | _cache(name))
            for name in support.KV_CACHE_DTYPES
        ),
        Asked("decode context parallelism", {"use_dcp": True}),
        Asked(
            "sparse attention, decode context parallelism", {"use_sparse": True, "use_dcp": True}
        ),
        Asked("prefill context parallelism", {"use_pcp": True}),
        Asked("fp8 queries, KV cache dtype auto", {}, _FP8_QUERY),
        *(
            Asked(f"fp8 queries, KV cache dtype {name}, on sm_90", _cache(name), _FP8_QUERY)
            for name in fp8_query.KV_CACHE_DTYPES
        ),
        Asked(
            "fp8 products of the indexer, on sm_90",
            {"use_sparse": True},
            ((fp8_indexer.VARIABLE, "1"),),
        ),
        Asked("batch-invariant mode", {"use_batch_invariant": True}),
        Asked(
            "sparse attention, batch-invariant mode",
            {"use_sparse": True, "use_batch_invariant": True},
        ),
        Asked("KV connectors", {"use_kv_connector": True}),
        Asked("adaptive verification of drafts", {"use_adaptive_verification": True}),
        Asked("non-causal attention", {"use_non_causal": True}),
        Asked("sliding window", {"has_sliding_window": True}),
        Asked("reference sliding window (R-SWA)", {"use_rswa": True}),
        Asked("attention sinks", {"has_sink": True}),
        Asked("KV cache scales of single heads", {"use_per_head_quant_scales": True}),
        Asked("full attention among image tokens", {"use_mm_prefix": True}),
        Asked("encoder attention", {"attn_type": "encoder_only"}),
        Asked("a layer without MLA", {"use_mla": False}),
    ]


def _cache(name: str) -> dict[str, Any]:
    """A cache of 16-bit rows must have the model's dtype, so the model gets the cache's."""
    dtype = {"float16": torch.float16}.get(name, torch.bfloat16)
    return {"kv_cache_dtype": name, "dtype": dtype}


def _reasons(changes: dict[str, Any], capability: DeviceCapability | None) -> list[str]:
    """Why the backend refuses; empty if it does not."""
    sparse = changes.get("use_sparse", False)
    backend: type[MlaBackend] = SparseMlaBackend if sparse else MlaBackend
    layer = AttentionSelectorConfig(
        head_size=576, dtype=torch.bfloat16, kv_cache_dtype="auto", block_size=64, use_mla=True
    )._asdict()
    known = inspect.signature(AttentionBackend.validate_configuration).parameters
    config = {k: v for k, v in (layer | changes).items() if k in known}
    reasons: list[str] = backend.validate_configuration(device_capability=capability, **config)
    return reasons


@contextmanager
def _environment(changes: tuple[tuple[str, str], ...]) -> Iterator[None]:
    """Our settings as in `changes`, else at their defaults: the page is not of who prints it."""
    before = dict(os.environ)
    for name in envs.ENV_VARS:
        os.environ.pop(name, None)
    os.environ.update(changes)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def section() -> str:
    """The table of features and the list of refusals."""
    rows: list[list[str]] = []
    refusals: list[tuple[str, str]] = []
    for what, changes, env, gpu in _features():
        with _environment(env):
            on_cpu, on_gpu = _reasons(changes, None), _reasons(changes, gpu)
        rows.append([what, yes(not on_cpu), yes(not on_gpu)])
        refusals += [(what, reason) for reason in on_gpu or on_cpu]
    builder = MlaBackend.get_builder_cls()
    graphs = builder._cudagraph_support.name
    lines = [
        f"## The backend in vLLM {compat.RANGE_TEXT}\n",
        table(["asked for", _CPU_NAME, f"{_GPU_NAME} of {support.compute_generations()}"], rows),
        "",
        f"* CUDA graphs: `AttentionCGSupport.{graphs}`.",
        f"* New tokens of a request in one decode step: 1 to {support.MAX_QUERY_LEN}, so up to "
        f"{support.MAX_QUERY_LEN - 1} speculative tokens, with sparse attention any number; "
        "with decode context parallelism none by a draft model of its own or by parallel drafting.",
        f"* The logarithm of the softmax sum is returned: {yes(_returns_lse())}.",
        "* DeepSeek Sparse Attention on a GPU of 10.x: up to vLLM 0.32. Refused with 0.33, whose "
        "kernel writes the indexer's keys with other scales.",
        "* Tensor parallelism: 1 to 128 heads on a rank. Pipeline, data and expert parallelism are "
        "vLLM's.",
        "",
        "The words of each refusal:",
        "",
        *(f"* {what}: {reason}" for what, reason in refusals),
        "",
    ]
    return "\n".join(lines)


def _returns_lse() -> bool:
    return bool(MlaBackend.get_impl_cls().can_return_lse_for_decode)
