# SPDX-License-Identifier: Apache-2.0
"""The least time that attention takes of a decode step, and what measured kernels take."""

from dataclasses import dataclass

from mla_kernels.layouts import MlaDims

from mla_serving.plan.estimate import Call, Floor
from mla_serving.plan.kernels import chosen
from mla_serving.plan.kv_cache import indexer_row_bytes, row_bytes
from mla_serving.plan.layout import Layout
from mla_serving.plan.model import MlaModel
from mla_serving.plan.rates import DENSE, INDEX_HEADS, INDEX_TOPK, INDEXER, SPARSE, Case, Rates

_MEASURED = MlaDims(512, 64)  # of the cases in rates.json
_CACHES = {"fp8": "fp8", "fp8_e4m3": "fp8", "fp8_ds_mla": "fp8_ds_mla"}  # their names there
_INDEXER_FLOPS_PER_KEY = 2  # a multiply and an add for each element of each index head


@dataclass(frozen=True)
class KernelTime:
    """Microseconds in one decode step of our kernel that an engine takes, or why there are none.

    us          between the times of the nearest measured cases with a lower and with a higher floor
                by where its floor lies between theirs; if it is not between two, by the ratio of
                its floor to the nearest's. No less than a case of as many requests, heads and
                tokens or fewer, nor than the least that was measured with this cache, as a launch
                has its price; no more than a case of as many of each or more, nor than the same
                with the next number of heads that was measured, nor, of attention, than the same
                with more requests
    case        name of the case that it is by, or that is nearest
    at_most     whether it is the time of that case as it is, which has a higher floor
    unmeasured  why there is no time
    """

    us: float | None = None
    case: str | None = None
    at_most: bool = False
    unmeasured: str | None = None


@dataclass(frozen=True)
class AttentionTime:
    """Microseconds of one decode step on one GPU, over the layers of the stage that takes longest.

    floor_us  the larger of FLOP / GEMM rate and bytes / read rate, both measured
    bound     which of the two it is: "compute" or "memory"
    kernels   "attention", and of a sparse model "indexer": its scores and top-k. What makes slots
              of the tokens that it chose was not measured
    """

    floor_us: float
    bound: str
    kernels: dict[str, KernelTime]

    @property
    def measured_us(self) -> float | None:
        """Of all kernels; None if one was not measured."""
        times = [kernel.us for kernel in self.kernels.values() if kernel.us is not None]
        return sum(times) if len(times) == len(self.kernels) else None


def time(
    model: MlaModel,
    layout: Layout,
    rates: Rates,
    kv_cache_dtype: str,
    batch: int,
    context: int,
    drafts: int = 0,
    mtp_layers: int = 0,
) -> AttentionTime:
    """One new token and `drafts` of each of `batch` requests (of all replicas) that have `context`
    tokens; in the model's layers, and in `mtp_layers` of its own as they make the first draft.

    With dcp a rank computes the heads of dcp ranks over 1 / dcp of the tokens.
    """
    new = 1 + drafts
    requests = -(-batch // layout.dp)
    tokens = context / layout.dcp
    index_call = requests, new * model.index_heads, tokens
    if model.sparse:  # each token chooses for itself
        seen = min(context, model.index_topk) / layout.dcp
        call = requests * new, layout.query_heads(model), seen
    else:
        call = requests, new * layout.query_heads(model), tokens

    def floor(flop: int, size: int) -> Floor:
        """By what a row of queries computes of a token, and the bytes of a token."""
        return lambda batch, rows, context: (
            batch * rows * context * flop / rates.gemm_tflops / 1e6,
            batch * context * size / rates.read_gbps / 1e3,
        )

    width = model.dims.head_dim + model.dims.kv_lora_rank
    attention = floor(2 * width, row_bytes(model, kv_cache_dtype))
    indexer = floor(_INDEXER_FLOPS_PER_KEY * model.index_dim, indexer_row_bytes(model))

    def floors(stage: range) -> tuple[float, float]:
        of_attention, of_indexer = attention(*call), indexer(*index_call)
        attentions, indexers = len(stage) * len(model.attentions), model.indexers(stage)
        return (
            attentions * of_attention[0] + indexers * of_indexer[0],
            attentions * of_attention[1] + indexers * of_indexer[1],
        )

    # The one with most layers may have fewer indexers than another.
    stage = max(layout.stages(model.layers, mtp_layers), key=lambda x: max(floors(x)))
    compute, memory = floors(stage)
    heads = layout.query_heads(model)
    cases, why = _attention_cases(model, rates, kv_cache_dtype, heads, call[-1])
    calls = len(stage) * len(model.attentions)
    kernels = {"attention": _time(_of_new_tokens(cases, new), why, attention, calls, *call)}
    if model.sparse:
        cases, why = _indexer_cases(model, rates)
        calls = model.indexers(stage)
        cases = _of_new_tokens(cases, new)
        kernels["indexer"] = _time(cases, why, indexer, calls, *index_call, rows_cost=True)
    return AttentionTime(max(compute, memory), "compute" if compute > memory else "memory", kernels)


def _of_new_tokens(cases: list[Case], new: int) -> list[Case]:
    """Those that tell of `new` tokens a request: of several also the ones that had one."""
    return cases if new > 1 else [case for case in cases if case.new_tokens == 1]


def _attention_cases(
    model: MlaModel, rates: Rates, kv_cache_dtype: str, heads: int, seen: float
) -> tuple[list[Case], str]:
    """The measured cases that are like this model's, and why there are none. Portable kernels were
    measured in bfloat16, and multiply float16 at the same rate."""
    if model.dims != _MEASURED:
        return [], f"only rows of {_MEASURED.kv_lora_rank} + {_MEASURED.rope_dim} were measured"
    cache = _CACHES.get(kv_cache_dtype, "16 bit")
    measured = rates.with_cache(SPARSE if model.sparse else DENSE, cache)
    what = f"{'sparse attention over a ' if model.sparse else ''}{kv_cache_dtype} cache"
    if not measured:
        return [], f"no {what} was measured"
    kernel = chosen(model, heads, cache, rates.gpu)
    cases = [case for case in measured if case.kernel == kernel]
    if model.sparse and seen == INDEX_TOPK:  # empty slots cost something, too
        cases = [case for case in cases if case.context == seen]
    return cases, f"no {what} was measured with the {kernel} kernel"


def _indexer_cases(model: MlaModel, rates: Rates) -> tuple[list[Case], str]:
    if (model.index_heads, model.index_topk) != (INDEX_HEADS, INDEX_TOPK):
        return [], f"only {INDEX_HEADS} heads that choose {INDEX_TOPK} tokens were measured"
    return rates.with_cache(INDEXER, "fp8"), "no indexer was measured"


def _time(
    cases: list[Case],
    why: str,
    floor: Floor,
    calls: int,
    batch: int,
    rows: int,
    context: float,
    rows_cost: bool = False,
) -> KernelTime:
    """Of `calls` calls in a step; rows_cost as `Call` has it."""
    if not cases:
        return KernelTime(unmeasured=why)
    us, case = Call(cases, floor, batch, rows, context, rows_cost).time()
    more = max(floor(case.batch, case.rows, case.context)) > max(floor(batch, rows, context))
    return KernelTime(calls * us, case.name, at_most=us == case.us and more)
