# SPDX-License-Identifier: Apache-2.0
"""Decode attention alone on a CPU: `mla_decode` against the compiled operator of stock vLLM.

    python benchmarks/decode_cpu.py [--threads 1 2] [--heads 16]

One layer's attention of one step, shuffled block tables. Stock is the operator that vLLM serves
with on this machine: `amx` for bf16 on a CPU with AMX tiles (blocks of 128 tokens), `cpu` otherwise
(16, the only size it takes). Ours takes blocks of 64, and rescale "flash" as in an engine on a CPU.
Both are checked against the reference first; a case of which one fails is reported and not timed.
Times in milliseconds, the least of alternating repetitions. Writes decode.json and decode.md to
results/cpu beside this file; of other threads or heads, and while it runs, the same with _partial
in their names.
"""

import argparse
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from arguments import count
from machine import describe_machine
from mla_kernels import mla_decode
from mla_kernels.decode.api import MAX_HEADS
from mla_kernels.testing import metrics
from mla_kernels.testing.metrics import MIRROR_BAR, SHORT_BAR
from outputs import claim, command, write, write_json
from partial import gather, lacks

DK, DV, SCALE = 576, 512, 192**-0.5
# Lengths of the requests of a batch: all alike, or spread evenly from a 16th of the longest to it.
SHAPES = [(b, n, False) for b in (1, 8, 32) for n in (64, 256, 1024)] + [(32, 1024, True)]
# One client, and a few: long, of a length that fills no block, and unlike each other.
SHAPES += [(1, 300, False), (1, 4096, False), (2, 256, False), (4, 256, False), (4, 1024, True)]
SHAPES.sort()
# Short calls are repeated until they took so long together.
SECONDS = 0.3
THREADS, HEADS = (1, 2), 16
DTYPES = (torch.bfloat16, torch.float32)
# What fails one case, of checks, operators and memory. Anything else would fail them all.
FAULTS = (RuntimeError, AssertionError, ValueError)
Row = dict[str, Any]


def paged(lens: list[int], block: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """A random cache [num_blocks, block, DK] and a shuffled block table for it."""
    columns = -(-max(lens) // block)
    order = torch.randperm(len(lens) * columns, dtype=torch.int32)
    cache = torch.randn(len(order), block, DK).to(dtype)
    return cache, order.view(len(lens), columns)


def lengths_of(batch: int, longest: int, mixed: bool) -> list[int]:
    """All alike, or from `longest` down to a 16th of it."""
    less = longest - longest // 16 if mixed else 0
    return [longest - i * less // max(batch - 1, 1) for i in range(batch)]


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


def stock_operator(dtype: torch.dtype) -> str:
    """The one that vLLM takes for this dtype on this CPU."""
    return "amx" if dtype == torch.bfloat16 and torch.cpu._is_amx_tile_supported() else "cpu"


def stock_cpu(
    q: torch.Tensor, cache: torch.Tensor, table: torch.Tensor, seq_lens: torch.Tensor
) -> torch.Tensor:
    """What vLLM's CPU_MLA does in a layer."""
    from vllm._custom_ops import mla_decode_kvcache_cpu

    out = torch.empty(*q.shape[:2], DV, dtype=q.dtype)
    mla_decode_kvcache_cpu(out, q, cache, SCALE, table, seq_lens)
    return out


def stock_amx(
    q: torch.Tensor, cache: torch.Tensor, table: torch.Tensor, seq_lens: torch.Tensor
) -> Callable[[], torch.Tensor]:
    """What vLLM's AMX_MLA does in a layer, after what it does once a step for all layers."""
    from vllm._custom_ops import cpu_mla_decode
    from vllm.v1.attention.backends.mla import amx_mla

    B, H, _ = q.shape
    rows = cache.view(-1, 1, DK)
    token_slots = amx_mla._expand_block_table(table, cache.shape[1])
    lengths, requests = seq_lens.long(), torch.arange(B)
    splits = amx_mla._compute_num_kv_splits(int(seq_lens.max()), torch.get_num_threads())

    def layer() -> torch.Tensor:
        out = torch.zeros(B, H, DV, dtype=q.dtype)
        logits = torch.zeros(B, H, splits, DV + 1)
        new_rows = (None, None, None)  # already in the cache
        where = (token_slots, requests, lengths)
        features = (0.0, False, 0, None, None)
        cpu_mla_decode(q, rows, rows[..., :DV], out, *new_rows, logits, *where, SCALE, *features)
        return out

    return layer


def measure(
    batch: int, longest: int, mixed: bool, heads: int, dtype: torch.dtype, repetitions: int
) -> dict[str, float]:
    """Times of both, after a check of both against the reference."""
    lens = lengths_of(batch, longest, mixed)
    seq_lens = torch.tensor(lens, dtype=torch.int32)
    operator = stock_operator(dtype)
    block = {"cpu": 16, "amx": 128}[operator]
    cache, table = paged(lens, 64, dtype)
    stock_cache, stock_table = paged(lens, block, dtype)
    q = torch.randn(batch, 1, heads, DK).to(dtype)
    for i in range(batch):  # the same rows in both caches
        rows = cache[table[i].long()].flatten(0, 1)[: lens[i]]
        rows = torch.nn.functional.pad(rows, (0, 0, 0, -len(rows) % block))
        stock_cache[stock_table[i, : len(rows) // block].long()] = rows.view(-1, block, DK)
    given = (q.squeeze(1).contiguous(), stock_cache, stock_table, seq_lens)
    stock = stock_amx(*given) if operator == "amx" else partial(stock_cpu, *given)

    def ours() -> torch.Tensor:
        options = {"scale": SCALE, "kv_lora_rank": DV, "rescale": "flash"}
        return mla_decode(q, cache, table, seq_lens, **options)[0]

    options = {"scale": SCALE, "kv_lora_rank": DV}
    exact = (q.float(), cache.float(), table, seq_lens)  # a rounded reference has an error too
    want = mla_decode(*exact, impl="reference", **options)[0].squeeze(1)
    check(ours().squeeze(1), want, f"ours, {batch} x {longest}")
    check(stock(), want, f"stock, {batch} x {longest}")
    return least_ms({"ours": ours, "stock": stock}, repetitions)


def check(out: torch.Tensor, want: torch.Tensor, case: str) -> None:
    """RuntimeError if a result is off the reference by more than the kernels' tests allow."""
    bar = MIRROR_BAR if out.dtype == torch.float32 else SHORT_BAR
    if failures := bar.failures(metrics.measure(out, want)):
        raise RuntimeError(f"{case} differs from the reference: {failures}")


def tried(case: Row, measure: Callable[[], dict[str, float]]) -> Row:
    """The row of a case: its times, or what failed; the next case is measured all the same."""
    try:
        row = {**case, **measure()}
    except FAULTS as problem:
        traceback.print_exc()
        said = " ".join(str(problem).split())  # a line of the page
        row = {**case, "failed": f"{type(problem).__name__}: {said}"[:200]}
    print(row, flush=True)
    return row


def not_timed(rows: list[Row], keys: Sequence[str]) -> list[str]:
    """The cases that failed, each named by some of its row."""
    failed = [row for row in rows if "failed" in row]
    named = [", ".join(f"{key} {row[key]}" for key in keys) for row in failed]
    listed = [f"* {name}: {row['failed']}" for name, row in zip(named, failed, strict=True)]
    return ["", "Not timed:", "", *listed] if failed else []


def markdown(report: Row) -> str:
    machine = report["machine"]
    lines = [
        "# Decode attention on a CPU",
        "",
        f"Written by `{report['command']}`. {machine['cpu']}, vLLM {machine['vllm']}, torch "
        f"{machine['torch']}, commit {machine['commit']}. {report['heads']} heads; ms a layer.",
        "",
        *([report["note"], ""] if "note" in report else []),
        "| threads | dtype | stock's operator | batch | lengths | ours | stock | stock / ours |",
        "|--:|---|---|--:|--:|--:|--:|--:|",
    ]
    for r in report["rows"]:
        if "failed" in r:
            continue
        lines.append(
            f"| {r['threads']} | {r['dtype']} | {r['operator']} | {r['batch']} | {r['lengths']} "
            f"| {r['ours']:.2f} | {r['stock']:.2f} | {r['stock'] / r['ours']:.2f} |"
        )
    lines += not_timed(report["rows"], ("threads", "dtype", "batch", "lengths"))
    return "\n".join(lines) + "\n"


def write_report(report: Row, folder: Path, ending: str) -> None:
    """decode.json and .md in `folder`, with `ending` behind their names."""
    write_json(folder / f"decode{ending}.json", report)
    write(folder / f"decode{ending}.md", markdown(report))


def query_heads(text: str) -> int:
    """Of one layer: as many as our ops take."""
    heads = count(text)
    if heads > MAX_HEADS:
        raise argparse.ArgumentTypeError(f"expected 1 to {MAX_HEADS} heads, got {heads}")
    return heads


def parse_arguments(doc: str, repetitions: int, argv: list[str] | None) -> argparse.Namespace:
    """Of a benchmark of one layer on a CPU; some: with other threads or heads than its page of all.
    The folder for the results is there then."""
    parser = argparse.ArgumentParser(description=doc.split("\n", 1)[0])
    parser.add_argument("--threads", nargs="+", type=count, default=list(THREADS))
    parser.add_argument("--heads", type=query_heads, default=HEADS)
    parser.add_argument("--repetitions", type=count, default=repetitions)
    default = Path(__file__).parent / "results" / "cpu"
    parser.add_argument("--results", type=Path, default=default)
    args = parser.parse_args(argv)
    args.some = lacks(args.threads, THREADS) or args.heads != HEADS
    claim(args.results)
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(__doc__, 15, argv)
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    torch.manual_seed(0)

    def measure_case(case: tuple[int, torch.dtype, tuple[int, int, bool]]) -> list[Row]:
        threads, dtype, (batch, longest, mixed) = case
        torch.set_num_threads(threads)
        row: Row = {"threads": threads, "dtype": str(dtype).removeprefix("torch.")}
        row |= {"operator": stock_operator(dtype), "batch": batch}
        row |= {"lengths": f"{longest // 16}-{longest}" if mixed else str(longest)}
        how = (args.heads, dtype, args.repetitions)
        return [tried(row, lambda: measure(batch, longest, mixed, *how))]

    report = {"command": command("decode_cpu", argv), "machine": describe_machine()}
    report["heads"] = args.heads
    cases = list(product(args.threads, DTYPES, SHAPES))
    rows = gather("decode", report, cases, measure_case, write_report, args, some=args.some)
    return 1 if any("failed" in row for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
