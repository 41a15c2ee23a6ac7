# SPDX-License-Identifier: Apache-2.0
"""The least time that attention takes of a decode step, and what measured kernels take."""

from dataclasses import dataclass

from mla_kernels.layouts import MlaDims

from mla_serving.plan.kv_cache import indexer_row_bytes, row_bytes
from mla_serving.plan.layout import Layout
from mla_serving.plan.model import MlaModel
from mla_serving.plan.rates import Rates

_MEASURED = MlaDims(512, 64)  # of the cases in rates.json
_SPARSE_STEPS = "benchmarks/results/h200/sparse_steps.md"
_INDEXER_FLOPS_PER_KEY = 2  # a multiply and an add for each element of each index head


@dataclass(frozen=True)
class AttentionTime:
    """Microseconds of one decode step on one GPU, over the layers of the stage that takes longest.

    floor_us     the larger of FLOP / GEMM rate and bytes / read rate, both measured
    bound        which of the two it is: "compute" or "memory"
    measured_us  the floor over the share of its floor that the nearest measured case reaches, but
                 no less than the least that was measured with this cache: a launch has its price
    nearest      name of that case
    least        whether it is the one of the least time
    unmeasured   why there is neither
    """

    floor_us: float
    bound: str
    measured_us: float | None
    nearest: str | None
    least: bool = False
    unmeasured: str | None = None


def time(
    model: MlaModel,
    layout: Layout,
    rates: Rates,
    kv_cache_dtype: str,
    batch: int,
    context: int,
) -> AttentionTime:
    """One new token of each of `batch` requests (of all replicas) that have `context` tokens.

    With dcp (dense models), a rank computes the heads of dcp ranks over 1 / dcp of the tokens.
    """
    requests = -(-batch // layout.dp)
    heads = layout.query_heads(model)
    tokens = context / layout.dcp
    seen = min(context, model.index_topk) if model.sparse else tokens
    width = model.dims.head_dim + model.dims.kv_lora_rank

    def floors(stage: range) -> tuple[float, float]:
        """Microseconds of its computing and of its reading."""
        flop = len(stage) * 2 * requests * heads * seen * width
        size = len(stage) * requests * seen * row_bytes(model, kv_cache_dtype)
        keys = model.indexers(stage) * requests * tokens
        flop += keys * _INDEXER_FLOPS_PER_KEY * model.index_heads * model.index_dim
        size += keys * indexer_row_bytes(model)
        return flop / rates.gemm_tflops / 1e6, size / rates.read_gbps / 1e3

    # The one with most layers may have fewer indexers than another.
    stage = max(layout.stages(model.layers), key=lambda x: max(floors(x)))
    compute, memory = floors(stage)
    floor = max(compute, memory)
    bound = "compute" if compute > memory else "memory"
    cache = {"fp8": "fp8", "fp8_e4m3": "fp8", "fp8_ds_mla": "fp8_ds_mla"}.get(kv_cache_dtype)
    if model.sparse:
        why = f"no rates of sparse attention here; whole steps are in {_SPARSE_STEPS}"
        return AttentionTime(floor, bound, None, None, unmeasured=why)
    if model.dims != _MEASURED:
        widths = f"{_MEASURED.kv_lora_rank} + {_MEASURED.rope_dim}"
        why = f"only rows of {widths} were measured"
        return AttentionTime(floor, bound, None, None, unmeasured=why)
    cases = rates.with_cache(cache or "16 bit")
    if not cases:
        why = f"no {kv_cache_dtype} cache was measured"
        return AttentionTime(floor, bound, None, None, unmeasured=why)
    nearest = min(cases, key=lambda case: case.distance(requests, heads, tokens))
    least = min(cases, key=lambda case: case.us)
    measured, shortest = floor * nearest.us / nearest.floor_us, len(stage) * least.us
    if measured < shortest:
        return AttentionTime(floor, bound, shortest, least.name, least=True)
    return AttentionTime(floor, bound, measured, nearest.name)
