# SPDX-License-Identifier: Apache-2.0
"""Sparse attention and the Lightning Indexer on a CPU, where stock vLLM has neither.

    python benchmarks/sparse_cpu.py [--threads 1 2] [--heads 16]

One layer's share of a step: `mla_sparse_attention` with both rescales over shuffled blocks, beside
dense attention (`mla_decode`, as an engine on a CPU calls it) to all tokens of the same requests,
and `indexer_topk` with 64 heads over fp8 keys. An engine does not call it where no token sees more
than it may choose. Results of some tokens, and the indexer's scores, are checked against the
reference first; a case that fails is reported and not timed. Times in milliseconds, the least of
alternating repetitions. Writes sparse.json and sparse.md to results/cpu beside this file; of other
threads or heads, and while it runs, the same with _partial in their names.
"""

import sys
from itertools import product
from pathlib import Path
from typing import Any

import torch
from decode_cpu import (
    DK,
    DTYPES,
    DV,
    SCALE,
    Row,
    check,
    least_ms,
    not_timed,
    paged,
    parse_arguments,
    tried,
)
from machine import describe_machine
from mla_kernels import (
    exact_topk,
    indexer_scores,
    indexer_topk,
    mla_decode,
    mla_sparse_attention,
    positions_to_slots,
    write_indexer_cache,
)
from outputs import command, write, write_json
from partial import gather

BLOCK, INDEX_HEADS, INDEX_DIM = 64, 64, 128
# Requests, their tokens (each, the new ones included), new tokens of each, index_topk.
CASES = [
    (1, 300, 1, 2048),
    (8, 300, 1, 2048),
    (32, 300, 1, 2048),
    (1, 8000, 1, 2048),
    (8, 4000, 1, 2048),
    (8, 300, 2, 2048),
    (1, 256, 256, 2048),
    (1, 1024, 1024, 2048),
    (1, 2560, 512, 2048),
    (1, 2560, 512, 512),
]
NAMED = ("requests", "tokens", "new", "topk")


def chosen_of(lengths: torch.Tensor, k: int) -> torch.Tensor:
    """Positions [T, k] as an indexer chooses them: all of a short row, any k of a longer one."""
    chosen = torch.full((len(lengths), k), -1, dtype=torch.int32)
    for row, n in zip(chosen, lengths.tolist(), strict=True):
        row[: min(n, k)] = torch.arange(n) if n <= k else torch.randperm(n)[:k].sort().values
    return chosen


def check_indexer(chosen: torch.Tensor, few: slice, *batch: torch.Tensor) -> None:
    """The scores of some rows by the reference, and that these rows chose the largest."""
    q, keys, weights, table, seq_lens, lengths = batch
    ids = torch.arange(len(q), dtype=torch.int32) // (len(q) // len(seq_lens))
    lengths = lengths[few].contiguous()
    rows: dict[str, Any] = {"request_ids": ids[few].contiguous(), "lengths": lengths}
    scores, want = (
        indexer_scores(q[few], keys, weights[few], table, seq_lens, impl=impl, **rows)
        for impl in ("torch", "reference")
    )
    torch.testing.assert_close(scores, want, rtol=1e-5, atol=1e-4)
    largest = exact_topk(scores, chosen.shape[1], lengths=lengths, impl="reference")
    if not torch.equal(chosen[few], largest):
        raise RuntimeError("the indexer's choice differs from that of its own scores")


def measure_case(
    case: tuple[int, int, int, int], heads: int, dtype: torch.dtype, repetitions: int
) -> dict[str, float]:
    """Times of one case, after the check."""
    requests, tokens, new, k = case
    T = requests * new
    cache, table = paged([tokens] * requests, BLOCK, dtype)
    seq_lens = torch.full((requests,), tokens, dtype=torch.int32)
    lengths = (tokens - new + 1 + torch.arange(new)).repeat(requests).int()
    slots = positions_to_slots(chosen_of(lengths, k), table)
    q = torch.randn(T, heads, DK).to(dtype)
    options: dict[str, Any] = {"scale": SCALE, "kv_lora_rank": DV}
    few = slice(0, T, max(T // 16, 1))  # the reference takes long
    exact = (q[few].float(), cache.float())  # a rounded reference has an error too
    want = mla_sparse_attention(*exact, slots[few], impl="reference", **options)[0]
    calls = {}
    for rescale in ("flash", "pow2"):
        calls[rescale] = lambda rescale=rescale: mla_sparse_attention(
            q, cache, slots, rescale=rescale, **options
        )
        check(calls[rescale]()[0][few], want, f"{case} {rescale}")
    if new <= 8:
        queries = q.view(requests, new, heads, DK)
        calls["dense"] = lambda: mla_decode(
            queries, cache, table, seq_lens, rescale="flash", **options
        )
        first = (queries[:1].float(), cache.float(), table[:1], seq_lens[:1])
        want = mla_decode(*first, impl="reference", **options)[0]
        check(calls["dense"]()[0][:1].flatten(0, 1), want.flatten(0, 1), f"{case} dense")
    keys = torch.zeros(len(cache), BLOCK, INDEX_DIM + 4, dtype=torch.uint8)
    every = torch.arange(len(cache) * BLOCK)
    write_indexer_cache(torch.randn(len(every), INDEX_DIM).bfloat16(), keys, every)
    index_q = torch.randn(T, INDEX_HEADS, INDEX_DIM).to(torch.float8_e4m3fn)
    weights = torch.randn(T, INDEX_HEADS)
    calls["indexer"] = lambda: indexer_topk(
        index_q, keys, weights, table, seq_lens, k, lengths=lengths
    )
    check_indexer(calls["indexer"](), few, index_q, keys, weights, table, seq_lens, lengths)
    return least_ms(calls, repetitions)


def markdown(report: Row) -> str:
    machine = report["machine"]
    lines = [
        "# Sparse attention on a CPU",
        "",
        f"Written by `{report['command']}`. {machine['cpu']}, torch {machine['torch']}, commit "
        f"{machine['commit']}. {report['heads']} heads; ms a layer. `flash` is what an engine on "
        "a CPU takes; dense attention reads all tokens, and takes up to 8 new ones of a request.",
        "",
        *([report["note"], ""] if "note" in report else []),
        "| threads | dtype | requests | tokens | new | top-k | flash | pow2 | pow2 / flash | dense "
        "| indexer |",
        "|--:|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for r in report["rows"]:
        if "failed" in r:
            continue
        dense = f"{r['dense']:.2f}" if "dense" in r else "-"
        lines.append(
            f"| {r['threads']} | {r['dtype']} | {r['requests']} | {r['tokens']} | {r['new']} "
            f"| {r['topk']} | {r['flash']:.2f} | {r['pow2']:.2f} | {r['pow2'] / r['flash']:.2f} "
            f"| {dense} | {r['indexer']:.2f} |"
        )
    lines += not_timed(report["rows"], ("threads", "dtype", *NAMED))
    return "\n".join(lines) + "\n"


def write_report(report: Row, folder: Path, ending: str) -> None:
    """sparse.json and .md in `folder`, with `ending` behind their names."""
    write_json(folder / f"sparse{ending}.json", report)
    write(folder / f"sparse{ending}.md", markdown(report))


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(__doc__, 5, argv)
    torch.manual_seed(0)

    def measure_one(chosen: tuple[int, torch.dtype, tuple[int, int, int, int]]) -> list[Row]:
        threads, dtype, case = chosen
        torch.set_num_threads(threads)
        row: Row = {"threads": threads, "dtype": str(dtype).removeprefix("torch.")}
        row |= dict(zip(NAMED, case, strict=True))
        return [tried(row, lambda: measure_case(case, args.heads, dtype, args.repetitions))]

    report = {"command": command("sparse_cpu", argv), "machine": describe_machine()}
    report["heads"] = args.heads
    cases = list(product(args.threads, DTYPES, CASES))
    rows = gather("sparse", report, cases, measure_one, write_report, args, some=args.some)
    return 1 if any("failed" in row for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
