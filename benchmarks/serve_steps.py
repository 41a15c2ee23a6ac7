# SPDX-License-Identifier: Apache-2.0
"""`serve.py --mode steps`: for each head count, one engine per backend, and all cases on them."""

import argparse
import contextlib
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from serve_cases import dense_overrides, step_cases
from step_driver import Engine, measure

Row = dict[str, Any]


def engine_options(args: argparse.Namespace, heads: int, batches: list[int], longest: int) -> Row:
    """Keywords of vllm.LLM, the same for every backend."""
    options: Row = {
        "model": str(args.model),
        "dtype": args.dtype,
        "block_size": 64,
        "max_model_len": longest + args.steps + 256,
        "max_num_seqs": max(batches),
        "max_num_batched_tokens": max(2048, max(batches)),
        "kv_cache_memory_bytes": int(args.cache_gib * 2**30),
        # Of the weights and the working memory; the engines of all backends share the GPU.
        "gpu_memory_utilization": round(0.92 / len(args.backends), 3),
        "seed": 0,
    }
    if not args.as_is:
        options["hf_overrides"] = dense_overrides(args.layers, heads)
    if args.eager:
        options["enforce_eager"] = True
    elif not args.compile:
        options["compilation_config"] = {
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": sorted(set(batches)),
        }
    return options


def cache_tokens(args: argparse.Namespace) -> int:
    """Tokens that the cache of one engine holds."""
    config = json.loads((args.model / "config.json").read_text())
    layers = config["num_hidden_layers"] if args.as_is else args.layers
    width = config["kv_lora_rank"] + config["qk_rope_head_dim"]
    element = 4 if args.dtype == "float32" else 2
    return int(args.cache_gib * 2**30) // (layers * width * element)


def run(args: argparse.Namespace, save: Callable[[Row], None]) -> None:
    """Measure; rows go to `save`."""
    deadline = time.monotonic() + args.time_limit
    cases = step_cases(args.batches, args.contexts)
    fitting = [case for case in cases if case[0] * (case[1] + 64) <= cache_tokens(args)]
    if not fitting:
        raise ValueError(f"none of {cases} fits a cache of {args.cache_gib:g} GiB")
    batches = sorted({batch for batch, _ in fitting})
    longest = max(context for _, context in fitting)
    heads_list = args.heads if not args.as_is else args.heads[:1]
    share = args.time_limit / len(heads_list)
    with tempfile.TemporaryDirectory() as folder:
        for place, heads in enumerate(heads_list):
            options = engine_options(args, heads, batches, longest)
            with contextlib.ExitStack() as stack:
                engines = [
                    stack.enter_context(
                        Engine(backend, options, Path(folder) / f"{backend}-{heads}.log")
                    )
                    for backend in args.backends
                ]
                measure(
                    engines,
                    cases,
                    heads=heads,
                    max_tokens=cache_tokens(args),
                    steps=args.steps,
                    seconds=args.case_seconds,
                    deadline=deadline - share * (len(heads_list) - 1 - place),
                    save=save,
                )
