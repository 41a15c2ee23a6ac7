# SPDX-License-Identifier: Apache-2.0
"""Dense MLA decode: our kernels and their peers, every case in one run.

    python benchmarks/dense_decode.py [--paused | --sustained [--seconds S]]
                                      [--cases REGEX] [--impls REGEX] [--results DIR]

Every implementation is checked against the definition first; one that fails is reported and not
timed. A peer whose results are not finite because it reads past a request's end, where NaN lies, is
checked and timed over zeros there. Times are medians of CUDA-graph replays with a cold L2; with
--paused the GPU idles before each; with --sustained replays run for seconds, with the energy of a
step. Peers (FlashMLA, FlashAttention-3 and Triton MLA as vLLM ships them) are left out where vLLM
is not installed. Writes dense_decode.json, .md and .png, or dense_paused or dense_sustained .json
and .md, to results/h200 beside this file; of --cases or --impls, and while it runs, the same with
_partial in their names.
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
from dense_cases import (
    LATENT,
    SCALE,
    SHAPES,
    Batch,
    Shape,
    golden,
    has_tails,
    make_batch,
    zero_tails,
)
from dense_modes import MODES, sustained_roofs
from dense_peers import PEERS, Run
from dense_report import stem, write_report
from gpu import Timer, describe_gpu, need_gpu, without_vllm
from mla_kernels import mla_decode, plan_mla_decode
from mla_kernels.decode.choice import choose_decode_impl
from mla_kernels.testing.metrics import SHORT_BAR, Bar, measure
from outputs import claim, command
from partial import gather

CHECKED = 6  # requests compared with the definition, spread over the batch
OURS = {
    "mla_kernels/hopper/pow2": {"impl": "hopper"},
    "mla_kernels/hopper/amla": {"impl": "hopper", "rescale": "amla"},
    "mla_kernels/hopper/pow2/deterministic": {"impl": "hopper", "deterministic": True},
    "mla_kernels/hopper/fp8_query": {"impl": "hopper", "dtype": torch.float8_e4m3fn},
    "mla_kernels/triton/pow2": {"impl": "triton"},
    "mla_kernels/triton/amla": {"impl": "triton", "rescale": "amla"},
    "mla_kernels/triton/flash": {"impl": "triton", "rescale": "flash"},
    "mla_kernels/triton/pow2/deterministic": {"impl": "triton", "deterministic": True},
}

# What rounds q and P to e4m3 cannot meet our bar: P alone is off by 2.7e-2 (docs/numerics.md).
_FP8_BAR = Bar(3e-2, 2e-1, 2e-1)
BARS = {"peer/flashmla_fp8": _FP8_BAR, "mla_kernels/hopper/fp8_query": _FP8_BAR}


def ours(batch: Batch, options: dict[str, Any]) -> Run | None:
    """One of our kernels with a plan made beforehand, as every layer of a step calls it; q rounded
    beforehand too, where `options` name a dtype."""
    dtype = options.get("dtype", batch.q.dtype)
    kernel = {
        "dtype": dtype,
        "kv_cache_dtype": batch.kv_cache.dtype,
        "rescale": options.get("rescale", "pow2"),
    }
    try:
        choose_decode_impl(options["impl"], batch.q.device, **kernel)
    except ValueError:
        return None
    plan = plan_mla_decode(
        batch.seq_lens,
        num_heads=batch.shape.heads,
        s_q=batch.shape.s_q,
        impl=options["impl"],
        deterministic=options.get("deterministic", False),
        max_seq_len=max(batch.shape.lengths),
        **kernel,
    )
    q = batch.q.to(dtype)
    out = batch.q.new_full((*batch.q.shape[:-1], LATENT), torch.nan)
    modes = {name: value for name, value in options.items() if name != "dtype"}

    def run() -> torch.Tensor:
        return mla_decode(
            q,
            batch.kv_cache,
            batch.block_table,
            batch.seq_lens,
            scale=SCALE,
            kv_scale=batch.kv_scale,
            plan=plan,
            out=out,
            **modes,
        )[0]

    return run


def implementations() -> dict[str, Callable[[Batch], Run | None]]:
    """By name; one that gives None does not take the case, or this GPU."""
    return {name: partial(ours, options=options) for name, options in OURS.items()} | PEERS


def check(batch: Batch, wanted: re.Pattern[str]) -> tuple[list[dict[str, Any]], dict[str, Run]]:
    """A row for each implementation, and those that may be timed."""
    shape = batch.shape
    count = len(shape.lengths)
    requests = sorted({round(i * (count - 1) / max(CHECKED - 1, 1)) for i in range(CHECKED)})
    want = golden(batch, requests)
    rows, runs = [], {}
    for name, make in implementations().items():
        if not wanted.search(name):
            continue
        row: dict[str, Any] = {"case": shape.name, "impl": name}
        try:
            run = make(batch)
            if run is None:
                continue
            out = run()
            if name in PEERS and has_tails(shape) and not out.isfinite().all():
                row["tails"] = "zeros"  # it reads what no request has, and multiplies it by 0
                run = make(zero_tails(batch))
                assert run is not None, "a peer took the case and takes it no more"
                out = run()
            error = measure(out[requests], want)
            row["rel_err"] = round(error.fro, 6)
            failures = BARS.get(name, SHORT_BAR).failures(error)
            if failures:
                row["failed"] = "; ".join(failures)
        except Exception as problem:
            if without_vllm(problem):
                continue
            traceback.print_exc()
            row["failed"] = f"{type(problem).__name__}: {problem}"[:200]
        rows.append(row)
        if "failed" not in row:
            runs[name] = run
    return rows, runs


def bench(
    shape: Shape, timer: Timer, wanted: re.Pattern[str], mode: str, seconds: float
) -> list[dict[str, Any]]:
    """Rows of one case."""
    rows, runs = check(make_batch(shape), wanted)
    for name, found in MODES[mode].time(timer, shape, runs, seconds).items():
        row = next(r for r in rows if r["impl"] == name)
        us = found.pop("us")
        row["us"] = round(us, 2)
        row["tflops"] = round(shape.flops / us / 1e6, 1)
        row["gbps"] = round(shape.bytes / us / 1e3, 1)
        row.update(found)
    return [{**row, "mode": mode} for row in rows]


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    modes = parser.add_mutually_exclusive_group()
    for mode in ("paused", "sustained"):
        modes.add_argument(
            f"--{mode}", dest="mode", action="store_const", const=mode, help=MODES[mode].help
        )
    parser.add_argument("--seconds", type=float, default=2.0, help="of each sustained run")
    parser.add_argument("--cases", type=pattern, help="regular expression on the case names")
    parser.add_argument("--impls", type=pattern, help="regular expression on the implementations")
    results = Path(__file__).parent / "results" / "h200"
    parser.add_argument("--results", type=Path, default=results)
    parser.set_defaults(mode="cold")
    args = parser.parse_args(argv)
    mode = MODES[args.mode]
    args.cases = args.cases or re.compile(mode.cases)
    args.impls = args.impls or re.compile(mode.impls)
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    names = matching("--cases", args.cases, (shape.name for shape in SHAPES))
    matching("--impls", args.impls, [*OURS, *PEERS])
    claim(args.results)
    need_gpu()
    torch.backends.cuda.matmul.allow_tf32 = False
    report: dict[str, Any] = {"machine": describe_gpu(), "mode": args.mode}
    print(json.dumps(report), flush=True)
    if args.mode == "sustained":
        report["roofs"] = sustained_roofs(args.seconds)
        print(json.dumps(report["roofs"]), flush=True)
    roofs = {**report["machine"], **report.get("roofs", {})}
    report["command"] = command("dense_decode", argv)
    timer = Timer()

    def measure_case(shape: Shape) -> list[dict[str, Any]]:
        found = bench(shape, timer, args.impls, args.mode, args.seconds)
        floor = round(shape.floor_us(roofs), 1)
        shown = [f"{r['impl']} {r.get('us', r.get('failed'))}" for r in found]
        print(f"{shape.name} floor {floor}: {' | '.join(shown)}", flush=True)
        torch.cuda.empty_cache()
        return [{**row, "floor_us": floor} for row in found]

    mode = MODES[args.mode]
    some = (args.cases.pattern, args.impls.pattern) != (mode.cases, mode.impls)
    cases = [shape for shape in SHAPES if shape.name in names]
    rows = gather(stem(args.mode), report, cases, measure_case, write_report, args, some=some)
    return 1 if any("failed" in row for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
