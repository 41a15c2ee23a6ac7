# SPDX-License-Identifier: Apache-2.0
"""`serve.py --mode steps`: for each head count, one engine per backend, and all cases on them.

All engines of all head counts import vLLM together, then wait: only those that are measured have
memory of the GPU. Cases whose cache is too large for four deep engines run on engines of fewer
layers.
"""

import argparse
import contextlib
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import serve_gate
from serve_cases import FP8_CACHES, dense_overrides, depths_of, engine_of, step_cases
from step_driver import ROUNDS, Engine, measure

Row = dict[str, Any]
Case = tuple[int, int]


def growth(args: argparse.Namespace) -> int:
    """Tokens by which a request grows while it is measured, and a bit."""
    return ROUNDS * int(args.steps) + 64


def engine_options(args: argparse.Namespace, heads: int, layers: int, cases: list[Case]) -> Row:
    """Keywords of vllm.LLM, the same for every backend."""
    batches = sorted({batch for batch, _ in cases})
    # Of the gate: every prompt and its answer.
    asked = [length + serve_gate.TOKENS for length in serve_gate.PROMPTS]
    tokens = max(sum(asked), *(batch * (context + growth(args)) for batch, context in cases))
    longest = max(*asked, *(context + growth(args) for _, context in cases))
    requests = max(len(asked), *batches)
    options: Row = {
        "model": str(args.model),
        "dtype": args.dtype,
        "block_size": 64,
        "max_model_len": longest + 192,
        "max_num_seqs": max(batches),
        "max_num_batched_tokens": max(2048, max(batches)),
        # A block of padding, and one of each request that is not full.
        "kv_cache_memory_bytes": (tokens + 64 * (requests + 1)) * token_bytes(args, layers),
        # Of the weights and the working memory; the engines of all backends share the GPU.
        "gpu_memory_utilization": round(0.92 / len(args.backends), 3),
        "kv_cache_dtype": args.kv_cache_dtype,
        "seed": 0,
    }
    if not args.as_is:
        options["hf_overrides"] = dense_overrides(layers, heads)
    if args.eager:
        options["enforce_eager"] = True
    elif not args.compile:
        options["compilation_config"] = {
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": batches,
        }
    return options


def token_bytes(args: argparse.Namespace, layers: int) -> int:
    """Cache of one token."""
    config = config_of(args)
    row = config["kv_lora_rank"] + config["qk_rope_head_dim"]
    if args.kv_cache_dtype not in FP8_CACHES:
        row *= 4 if args.dtype == "float32" else 2
    if args.kv_cache_dtype == "fp8_ds_mla":
        row = 656
    index = config["index_head_dim"] + 4 if "index_head_dim" in config else 0
    return int(layers * (row + index))


def config_of(args: argparse.Namespace) -> Row:
    """The model's config.json."""
    config: Row = json.loads((args.model / "config.json").read_text())
    return config


def heads_of(args: argparse.Namespace) -> list[int]:
    """Of the engines: those asked for, or the model's own."""
    return [config_of(args)["num_attention_heads"]] if args.as_is else args.heads


def layers_of(args: argparse.Namespace, heads: int) -> list[int]:
    """Of engines of so many heads, the deepest first, or the model's own."""
    return [config_of(args)["num_hidden_layers"]] if args.as_is else depths_of(heads, args.layers)


def depths(args: argparse.Namespace, heads: int, cases: list[Case]) -> dict[int, list[Case]]:
    """{layers: cases that engines of so many layers run}. ValueError if one fits none."""

    def fits(case: Case, layers: int) -> bool:
        need = case[0] * (case[1] + growth(args)) * token_bytes(args, layers)
        return bool(need <= args.cache_gib * 2**30)

    found: dict[int, list[Case]] = {}
    for case in cases:
        deepest_first = layers_of(args, heads)
        fitting = [layers for layers in deepest_first if fits(case, layers)]
        if not fitting:
            fewest = deepest_first[-1]
            others = "fewer --layers or " if fewest > 1 and not args.as_is else ""
            raise ValueError(
                f"{case} does not fit a cache of {args.cache_gib:g} GiB with {fewest} layers. "
                f"Mend: {others}a larger --cache-gib, or other --batches and --contexts"
            )
        found.setdefault(fitting[0], []).append(case)
    return found


def run(args: argparse.Namespace, save: Callable[[Row], None]) -> None:
    """Measure; rows go to `save`. SystemExit for a case that no engine has room for."""
    deadline = time.monotonic() + args.time_limit
    cases = step_cases(args.batches, args.contexts)
    try:
        groups = [
            (heads, layers, chosen)
            for heads in heads_of(args)
            for layers, chosen in depths(args, heads, cases).items()
        ]
    except ValueError as reason:
        raise SystemExit(str(reason)) from None
    groups.sort(key=lambda group: -len(group[2]))  # a run short of time has done most cases
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        engines: dict[tuple[int, int], list[Engine]] = {}
        for heads, layers, chosen in groups:
            options = engine_options(args, heads, layers, chosen)
            for backend in args.backends:
                log = Path(folder) / f"{backend}-{heads}-{layers}.log"
                name, env = engine_of(backend)
                engine = Engine(name, options, log, env=env, label=backend)
                stack.callback(engine.kill)
                engines.setdefault((heads, layers), []).append(engine)
        for started in engines.values():
            for engine in started:
                engine.answer()  # that vLLM is imported
        for heads, layers, chosen in groups:
            measure(
                engines[heads, layers],
                chosen,
                group={"heads": heads, "layers": layers},
                nats=serve_gate.tolerance(args.kv_cache_dtype, args.backends),
                steps=args.steps,
                seconds=args.case_seconds,
                deadline=deadline,
                save=save,
            )
            for engine in engines[heads, layers]:
                engine.kill()
