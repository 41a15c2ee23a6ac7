# SPDX-License-Identifier: Apache-2.0
"""The plan as text and as JSON."""

import json
from typing import Any

from mla_serving.plan import served
from mla_serving.plan.attention import KernelTime
from mla_serving.plan.cost import Plan, Question
from mla_serving.plan.layout import GIB
from mla_serving.plan.model import MlaModel


def as_json(plan: Plan) -> str:
    """All figures: bytes, tokens and microseconds, unrounded."""
    question = plan.question
    model, layout, attention = question.model, question.layout, plan.attention
    answer: dict[str, Any] = {
        "schema": 1,
        "model": {
            "name": model.name,
            "layers": model.layers,
            "heads": model.heads,
            "experts": model.experts,
            "parameters": model.parameters,
            "mtp_layers": question.mtp_layers,
            "sparse": model.sparse,
        },
        "cluster": {
            "gpu": question.gpu,
            "gpus": layout.gpus,
            "tp": layout.tp,
            "dp": layout.dp,
            "pp": layout.pp,
            "dcp": layout.dcp,
            "expert_parallel": layout.ep,
            "last_vllm": served.last_vllm(model, question.gpu),
        },
        "weights": {"bytes_per_gpu": plan.weight_bytes, "parts": plan.weights},
        "kv_cache": {
            "dtype": plan.kv_cache_dtype,
            "bytes_per_token": plan.token_bytes,
            "bytes_per_token_per_gpu": plan.gpu_token_bytes,
            "row_bytes": plan.row_bytes,
            "indexer_row_bytes": plan.indexer_row_bytes,
            "bytes_per_gpu": plan.cache_bytes,
            "tokens_per_gpu": plan.gpu_tokens,
            "tokens": plan.cluster_tokens,
        },
        "load": {
            "batch": question.batch,
            "context": question.context,
            "speculative_tokens": question.drafts,
            "requests_that_fit": plan.requests_that_fit,
            "fits": plan.fits,
        },
        "attention": None,
    }
    if attention is not None and question.rates is not None:
        answer["attention"] = {
            "floor_us": attention.floor_us,
            "bound": attention.bound,
            "measured_us": attention.measured_us,
            "kernels": {
                name: {
                    "measured_us": kernel.us,
                    "case": kernel.case,
                    "at_most": kernel.at_most,
                    "unmeasured": kernel.unmeasured,
                }
                for name, kernel in attention.kernels.items()
            },
            "source": question.rates.source(model.sparse),
        }
    return json.dumps(answer, indent=2)


def as_text(plan: Plan) -> str:
    """One line a figure, each with what it was made of."""
    question = plan.question
    model, layout = question.model, question.layout
    experts = f", {model.experts} experts" if model.experts else ""
    sizes = f"TP {layout.tp}, DP {layout.dp}, PP {layout.pp}, DCP {layout.dcp}"
    expert_parallel = ", experts whole" if layout.ep else ""
    last = served.last_vllm(model, question.gpu)
    versions = f"; sparse attention there with vLLM up to {last}" if last else ""
    parts = ", ".join(f"{name} {size / GIB:.1f}" for name, size in plan.weights.items())
    twice = " x 2 attentions" if model.twofold else ""
    every = range(model.layers + question.mtp_layers)
    rows = f"{len(every)} layers{twice} x {plan.row_bytes}"
    if model.sparse:
        rows += f" + {model.indexers(every)} indexers x {plan.indexer_row_bytes}"
    usable = question.memory * question.utilization
    longest = model.max_context or question.context
    # Stages differ in what they hold: weights, memory and tokens are those of this one.
    stage = " of the stage that holds fewest tokens" if layout.pp > 1 else ""
    beyond = f", beyond the model's {longest:,}" if question.context > longest else ""
    short = "" if plan.fits else f", fewer than the {question.batch} of --batch"
    lines = [
        ("model", f"{model.name}: {model.parameters / 1e9:.1f} B parameters, {model.layers} layers"
                  f", {model.heads} heads{experts}; {_uncounted(question)}, if any, not counted"),
        ("cluster", f"{layout.gpus} x {question.gpu}: {sizes}{expert_parallel}{versions}"),
        ("weights", f"{plan.weight_bytes / GIB:.1f} GiB a GPU{stage}: {parts}; {_stored(model)}"),
        ("KV cache", f"{plan.token_bytes:,} bytes a token: {rows}, {plan.kv_cache_dtype}"),
        ("memory", f"{plan.cache_bytes / GIB:.1f} GiB a GPU for the cache: {usable / GIB:.1f} "
                   f"({question.utilization:g} of {question.memory / GIB:.1f}) less weights and "
                   f"{question.reserve / GIB:.1f} for activations and graphs, an assumption"),
        ("tokens", f"{plan.gpu_tokens:,} a GPU, {plan.cluster_tokens:,} in the cluster"),
        ("requests", f"{plan.requests_that_fit:,} of {question.context:,} tokens{beyond}{short}"),
        ("attention", _attention(plan)),
    ]  # fmt: skip
    return "\n".join(f"{name:<10} {text}" for name, text in lines)


def _uncounted(question: Question) -> str:
    if question.mtp_layers:
        return f"{question.mtp_layers} more for MTP; encoders of images"
    drafts = "weights and cache of a draft model" if question.drafts else "MTP layers"
    return f"{drafts} and encoders of images"


def _stored(model: MlaModel) -> str:
    """What the linear layers were taken for: a checkpoint may say less than it holds."""
    scheme = model.scheme
    if scheme is None:
        return f"linear layers in {model.dtype}"
    some = scheme.skipped or scheme.only is not None
    which = "but those that its config leaves out" if some else "all of them"
    return f"linear layers in {scheme.bits:.4g} bits, {which}"


def _attention(plan: Plan) -> str:
    times, question = plan.attention, plan.question
    if times is None or question.rates is None:
        return f"no floor: nothing was measured on {question.gpu}"
    new = f", {1 + question.drafts} new ones each" if question.drafts else ""
    if question.drafts > 1:
        new += " (what makes drafts after the first is not counted)"
    text = (
        f"a decode step of {question.batch} requests of {question.context:,} tokens{new}: floor "
        f"{times.floor_us / 1e3:.2f} ms ({times.bound})"
    )
    if question.layout.pp > 1:
        text += ", in the slowest of its stages"
    several = len(times.kernels) > 1
    for name, kernel in times.kernels.items():
        text += f", {_kernel(name if several else 'kernel', kernel)}"
    if several and times.measured_us is not None:
        at_most = any(kernel.at_most for kernel in times.kernels.values())
        text += f", together {_ms(times.measured_us, at_most)}"
    return f"{text}; rates of {question.rates.source(question.model.sparse)}"


def _kernel(name: str, kernel: KernelTime) -> str:
    if kernel.us is None:
        return f"no time of our {name} ({kernel.unmeasured})"
    return f"our {name} {_ms(kernel.us, kernel.at_most)}, as {kernel.case}"


def _ms(us: float, at_most: bool) -> str:
    return f"{us / 1e3:.2f} ms" + (" or less" if at_most else "")
