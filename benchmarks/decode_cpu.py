# SPDX-License-Identifier: Apache-2.0
"""Decode attention alone on a CPU: `mla_decode` against the compiled operator of stock vLLM.

    python benchmarks/decode_cpu.py [--threads 1 2] [--heads 16]

One layer's attention of one step, block size 64 (ours) and 16 (the only one vLLM's operator takes),
shuffled block tables. Times in milliseconds, the least of alternating repetitions. Writes
decode.json and decode.md to results/cpu beside this file. On CPUs with AMX tiles vLLM serves with
another operator than the one timed here.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from machine import describe_machine
from mla_kernels import mla_decode

DK, DV, SCALE = 576, 512, 192**-0.5
# Lengths of the requests of a batch: all alike, or spread evenly from a 16th of the longest to it.
SHAPES = [(b, n, False) for b in (1, 8, 32) for n in (64, 256, 1024)] + [(32, 1024, True)]
# One client, and a few: long, of a length that fills no block, and unlike each other.
SHAPES += [(1, 300, False), (1, 4096, False), (2, 256, False), (4, 256, False), (4, 1024, True)]
SHAPES.sort()
# Short calls are repeated until they took so long together.
SECONDS = 0.3


def paged(lens: list[int], block: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """A random cache [num_blocks, block, DK] and a shuffled block table for it."""
    columns = -(-max(lens) // block)
    order = torch.randperm(len(lens) * columns, dtype=torch.int32)
    cache = torch.randn(len(order), block, DK).to(dtype)
    return cache, order.view(len(lens), columns)


def least_ms(calls: dict[str, Callable[[], Any]], repetitions: int) -> dict[str, float]:
    """The shortest time of each call, the calls taken in turn, at least so many times."""
    best = dict.fromkeys(calls, float("inf"))
    end = time.perf_counter() + SECONDS
    while repetitions > 0 or time.perf_counter() < end:
        repetitions -= 1
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            best[name] = min(best[name], 1e3 * (time.perf_counter() - start))
    return best


def measure(
    batch: int, longest: int, mixed: bool, heads: int, dtype: torch.dtype, repetitions: int
) -> dict[str, float]:
    """Times of both, after a check that they agree."""
    from vllm._custom_ops import mla_decode_kvcache_cpu

    step = longest * 15 // 16 // max(batch - 1, 1)
    lens = [longest - i * step if mixed else longest for i in range(batch)]
    seq_lens = torch.tensor(lens, dtype=torch.int32)
    cache, table = paged(lens, 64, dtype)
    stock_cache, stock_table = paged(lens, 16, dtype)
    q = torch.randn(batch, 1, heads, DK).to(dtype)
    for i in range(batch):  # the same rows in both caches
        rows = cache[table[i].long()].flatten(0, 1)
        pages = stock_table[i].long()
        stock_cache[pages] = rows[: len(pages) * 16].view(-1, 16, DK)
    stock_q, stock_out = q.squeeze(1).contiguous(), torch.zeros(batch, heads, DV, dtype=dtype)

    def ours() -> torch.Tensor:
        return mla_decode(q, cache, table, seq_lens, scale=SCALE, kv_lora_rank=DV)[0]

    def stock() -> torch.Tensor:
        mla_decode_kvcache_cpu(stock_out, stock_q, stock_cache, SCALE, stock_table, seq_lens)
        return stock_out

    torch.testing.assert_close(ours().squeeze(1), stock(), atol=2e-2, rtol=2e-2)
    return least_ms({"ours": ours, "stock": stock}, repetitions)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--repetitions", type=int, default=15)
    default = Path(__file__).parent / "results" / "cpu"
    parser.add_argument("--results", type=Path, default=default)
    args = parser.parse_args()
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    torch.manual_seed(0)
    rows = []
    for threads in args.threads:
        torch.set_num_threads(threads)
        for dtype in (torch.bfloat16, torch.float32):
            for batch, longest, mixed in SHAPES:
                times = measure(batch, longest, mixed, args.heads, dtype, args.repetitions)
                key = {"threads": threads, "dtype": str(dtype).removeprefix("torch.")}
                lens = f"{longest // 16}-{longest}" if mixed else str(longest)
                rows.append({**key, "batch": batch, "lengths": lens, **times})
                print(rows[-1], flush=True)
    machine = describe_machine()
    command = " ".join(["python", "benchmarks/decode_cpu.py", *sys.argv[1:]])
    report = {"command": command, "machine": machine, "heads": args.heads, "rows": rows}
    lines = [
        "# Decode attention on a CPU",
        "",
        f"Written by `{command}`. {machine['cpu']}, vLLM {machine['vllm']}, torch "
        f"{machine['torch']}, {args.heads} heads. Milliseconds a layer.",
        "",
        "| threads | dtype | batch | lengths | ours | stock | stock / ours |",
        "|--:|---|--:|--:|--:|--:|--:|",
    ]
    for r in rows:
        lines.append(
            f"| {r['threads']} | {r['dtype']} | {r['batch']} | {r['lengths']} | {r['ours']:.2f} "
            f"| {r['stock']:.2f} | {r['stock'] / r['ours']:.2f} |"
        )
    args.results.mkdir(parents=True, exist_ok=True)
    (args.results / "decode.json").write_text(json.dumps(report, indent=1) + "\n")
    (args.results / "decode.md").write_text("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
