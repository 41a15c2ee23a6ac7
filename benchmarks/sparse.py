# SPDX-License-Identifier: Apache-2.0
"""Sparse MLA attention, decode and prefill, beside FlashMLA and FlashAttention-3, in one run.

    python benchmarks/sparse.py [--cases REGEX] [--impls REGEX] [--results DIR]

Every implementation is checked against the definition first; one that fails is reported and not
timed. Times are medians of CUDA-graph replays with a cold L2. The peers are left out where vLLM is
not installed. Writes sparse.json and sparse.md to results/h200 beside this file; sparse.md also
shows the indexer and top-k rows of sparse_indexer.json if that lies there. Of --cases or --impls,
and while it runs, sparse_partial.json and .md of its own rows.
"""

import argparse
import json
import re
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from arguments import matching, pattern
from dense_cases import LATENT, SCALE
from gpu import Timer, describe_gpu, need_gpu, without_vllm
from mla_kernels import mla_sparse_attention, mla_sparse_workspace
from mla_kernels.flash_mla import flash_mla_sparse_fwd
from mla_kernels.sparse.choice import choose_sparse_impl
from mla_kernels.testing.metrics import SHORT_BAR, measure
from outputs import claim, command
from partial import gather
from sparse_cases import SHAPES, Batch, Shape, golden, make_batch
from sparse_peers import PEERS, Run
from sparse_report import write_report

CHECKED = 3  # tokens compared with the definition


def ours(batch: Batch, impl: str, deterministic: bool = False) -> Run | None:
    """As every layer of a step calls it: results and workspace made beforehand."""
    try:
        choose_sparse_impl(impl, batch.q.device, kv_cache_dtype=batch.kv_cache.dtype)
    except ValueError:
        return None
    T, H, _ = batch.q.shape
    slots = batch.shape.slots
    workspace = mla_sparse_workspace(T, H, slots, device=batch.q.device, impl=impl)
    out = batch.q.new_full((T, H, LATENT), torch.nan)
    lse = out.new_empty((T, H), dtype=torch.float32)

    def run() -> torch.Tensor:
        return mla_sparse_attention(
            batch.q,
            batch.kv_cache,
            batch.slots,
            scale=SCALE,
            out=out,
            lse=lse,
            workspace=workspace,
            kv_scale=batch.kv_scale,
            lengths=batch.lengths,
            deterministic=deterministic,
            impl=impl,
        )[0]

    return run


def drop_in(batch: Batch) -> Run | None:
    """FlashMLA's prefill as this package has it: with `max_logits`, results made by the call."""
    if not batch.shape.prefill:
        return None
    rows, slots = batch.kv_cache.flatten(0, 1).unsqueeze(1), batch.slots.unsqueeze(1)
    return lambda: flash_mla_sparse_fwd(batch.q, rows, slots, SCALE)[0]


def implementations() -> dict[str, Callable[[Batch], Run | None]]:
    """By name; one that gives None does not take the case, or this GPU."""
    return {
        **{f"mla_kernels/{name}": partial(ours, impl=name) for name in ("hopper", "triton")},
        "mla_kernels/deterministic": partial(ours, impl="auto", deterministic=True),
        "mla_kernels/flash_mla_sparse_fwd": drop_in,
        **PEERS,
    }


def check(batch: Batch, wanted: re.Pattern[str]) -> tuple[list[dict[str, Any]], dict[str, Run]]:
    """A row for each implementation, and those that may be timed."""
    last = batch.shape.tokens - 1
    tokens = sorted({round(i * last / (CHECKED - 1)) for i in range(CHECKED)})
    want = golden(batch, tokens)
    rows, runs = [], {}
    for name, make in implementations().items():
        if not wanted.search(name):
            continue
        row: dict[str, Any] = {"case": batch.shape.name, "op": batch.shape.op, "impl": name}
        try:
            run = make(batch)
            if run is None:
                continue
            error = measure(run()[tokens], want)
            row["rel_err"] = round(error.fro, 6)
            if SHORT_BAR.failures(error):
                row["failed"] = "; ".join(SHORT_BAR.failures(error))
        except Exception as problem:
            if without_vllm(problem):
                continue
            traceback.print_exc()
            row["failed"] = f"{type(problem).__name__}: {problem}"[:200]
        rows.append(row)
        if "failed" not in row:
            runs[name] = run
    return rows, runs


def bench(shape: Shape, timer: Timer, wanted: re.Pattern[str]) -> list[dict[str, Any]]:
    """Rows of one case."""
    rows, runs = check(make_batch(shape), wanted)
    big = shape.flops > 2e11
    for name, us in timer.medians(runs, rounds=2 if big else 3, repeats=3 if big else 8).items():
        row = next(r for r in rows if r["impl"] == name)
        row["us"] = round(us, 2)
        row["tflops"] = round(shape.flops / us / 1e6, 1)
        row["gbps"] = round(shape.bytes / us / 1e3, 1)
    return rows


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=pattern, default="", help="on the case names")
    parser.add_argument("--impls", type=pattern, default="", help="on the implementations")
    results = Path(__file__).parent / "results" / "h200"
    parser.add_argument("--results", type=Path, default=results)
    args = parser.parse_args(argv)
    names = matching("--cases", args.cases, (shape.name for shape in SHAPES))
    matching("--impls", args.impls, implementations())
    claim(args.results)
    need_gpu()
    torch.backends.cuda.matmul.allow_tf32 = False
    machine = describe_gpu()
    print(json.dumps(machine), flush=True)
    timer = Timer()

    def measure_case(shape: Shape) -> list[dict[str, Any]]:
        found = bench(shape, timer, args.impls)
        floor = round(shape.floor_us(machine), 1)
        shown = [f"{r['impl']} {r.get('us', r.get('failed'))}" for r in found]
        print(f"{shape.name} floor {floor}: {' | '.join(shown)}", flush=True)
        torch.cuda.empty_cache()
        return [{**row, "floor_us": floor} for row in found]

    report = {"machine": machine, "command": command("sparse", argv)}
    some = bool(args.cases.pattern or args.impls.pattern)
    cases = [shape for shape in SHAPES if shape.name in names]
    rows = gather("sparse", report, cases, measure_case, write_report, args, some=some)
    return 1 if any("failed" in row for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
