# SPDX-License-Identifier: Apache-2.0
"""Serving on a GPU: this backend against vLLM's own MLA backends, in one run on one machine.

    python benchmarks/serve.py --mode steps [--family v3.2] [--heads 128 16] [--time-limit 240]
    python benchmarks/serve.py --mode steps --family v3.2 --heads 16 --kv-cache-dtype fp8_ds_mla
    python benchmarks/serve.py --mode steps --kv-cache-dtype fp8
    python benchmarks/serve.py --mode serve [--shapes 1024/1024] [--concurrency 32] [--rates 1 4]
    python benchmarks/serve.py --mode serve --reduced --together --rounds 1 --repetitions 1

`steps` times decode steps inside the engine at fixed batch and context, without prefill, and says
how much of a step is attention. `serve` starts vLLM's server once per backend with the same options
and loads it with vLLM's own generator: closed loops and Poisson arrivals, all of them several
times, as a process has slow spells. Weights are random, of the shapes in configs/models. A server
that answers otherwise than the first is not loaded, such an engine is not timed (serve_gate.py).
Results go to results/h200 beside this file, of a cache that is not bf16 under a name that says so;
while it runs, and of some backends, heads, cases or loads, or of another dtype, model or way to
launch, with _partial behind it. `--report FILE` only renders a result again. Exits with 1 if
anything failed, disagrees or is withheld.
"""

import argparse
import json
import shlex
import sys
from pathlib import Path
from typing import Any

from arguments import checkpoint, count, objectives, positive
from ending import CUT_OFF, NO_TIME, exit_code, exit_on_signals, shortage
from outputs import claim, command
from partial import PARTIAL, lacks, take_away
from serve_cases import (
    BACKENDS,
    CACHE_GIB,
    CONCURRENCY,
    FP8_BACKENDS,
    FP8_CACHES,
    FP8_QUERY,
    MODEL,
    SHAPES,
    SPARSE_BACKENDS,
    SPARSE_BATCHES,
    SPARSE_CONTEXTS,
    SPARSE_FP8_BACKENDS,
    SPARSE_FP8_CACHE,
    SPARSE_MODEL,
    Shape,
    depths_of,
    heads_of_a_rank,
    loads,
    step_cases,
)
from serve_report import Report

Row = dict[str, Any]
# Options by what they have no effect with.
WITHOUT_EFFECT = {
    "--mode serve": ("batches", "contexts", "steps", "case_seconds"),
    "--mode steps": (
        "reduced", "shapes", "concurrency", "rounds", "repetitions", "rates", "open_requests",
        "slo", "together", "server_options",
    ),
    "--as-is": ("heads", "layers"),
    "--reduced": ("shapes", "concurrency", "rates"),
}  # fmt: skip


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--mode", choices=("serve", "steps"), default="serve")
    parser.add_argument(
        "--family", choices=("v3", "v3.2"), default="v3", help="dense or sparse attention"
    )
    parser.add_argument(
        "--backends", nargs="+", help=f"names of vLLM's, or {FP8_QUERY}: ours with fp8 queries"
    )
    parser.add_argument("--model", type=checkpoint, help="a directory with config.json")
    parser.add_argument("--kv-cache-dtype", default="auto", help="vLLM's name")
    parser.add_argument("--time-limit", type=positive, default=36000, help="seconds; then it stops")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument(
        "--compile", action="store_true", help="with torch.compile (slower start); else graphs only"
    )
    parser.add_argument("--heads", nargs="+", type=heads_of_a_rank, help="serve: the first")
    parser.add_argument(
        "--layers",
        nargs="+",
        type=count,
        help="dense, of DeepSeek-V3's width (default: by heads, DEPTHS in serve_cases.py); serve: "
        "the most; steps: of several the most that a case's cache has room for",
    )
    parser.add_argument("--as-is", action="store_true", help="the model's own layers and heads")
    parser.add_argument(
        "--cache-gib",
        type=positive,
        help=f"KV cache of each engine, at most (default: {CACHE_GIB}; serve without --together: "
        "what is left of the GPU)",
    )
    parser.add_argument("--eager", action="store_true", help="without CUDA graphs")
    default = Path(__file__).parent / "results" / "h200"
    parser.add_argument("--results", type=Path, default=default)
    parser.add_argument(
        "--report", type=Report.path, help="render this JSON again, measure nothing"
    )
    steps = parser.add_argument_group("--mode steps")
    steps.add_argument("--batches", nargs="+", type=count)
    steps.add_argument("--contexts", nargs="+", type=count)
    steps.add_argument("--steps", type=count, default=100, help="of a round; each case has six")
    steps.add_argument("--case-seconds", type=positive, default=10, help="at most, of a round")
    serve = parser.add_argument_group("--mode serve")
    serve.add_argument(
        "--reduced", action="store_true", help="few telling loads (serve_cases.py), for short runs"
    )
    serve.add_argument("--shapes", nargs="+", type=Shape.parse, default=list(SHAPES))
    serve.add_argument("--concurrency", nargs="+", type=count, default=list(CONCURRENCY))
    serve.add_argument("--rounds", type=count, default=3, help="requests per client")
    serve.add_argument(
        "--repetitions", type=count, default=3, help="of all loads; pages show the median of each"
    )
    serve.add_argument(
        "--rates", nargs="*", type=positive, help="requests a second (default: 0.5 and 0.8 of ours)"
    )
    serve.add_argument("--open-requests", type=count, default=100, help="of each open loop")
    slo = serve.add_argument("--slo", type=objectives, default="ttft:2000 tpot:50")
    slo.help = "milliseconds, for goodput"
    serve.add_argument(
        "--together",
        action="store_true",
        help="all servers at once, each with its share of the GPU's memory, loaded one at a time",
    )
    serve.add_argument("--server-options", type=shlex.split, default=[], help="more, in quotes")
    args = parser.parse_args(argv)
    _refuse_without_effect(parser, args)
    sparse = args.family == "v3.2"
    if sparse:
        if "fp8" in args.kv_cache_dtype and args.kv_cache_dtype != SPARSE_FP8_CACHE:
            parser.error(
                f"--kv-cache-dtype {args.kv_cache_dtype} of --family v3.2 is another layout in "
                f"FLASHMLA_SPARSE than in ours; say {SPARSE_FP8_CACHE}"
            )
        fp8 = args.kv_cache_dtype == SPARSE_FP8_CACHE
        compared = SPARSE_FP8_BACKENDS if fp8 else SPARSE_BACKENDS
    else:
        compared = FP8_BACKENDS if args.kv_cache_dtype in FP8_CACHES else BACKENDS
    args.backends = args.backends or list(compared)
    args.model = args.model or (SPARSE_MODEL if sparse else MODEL)
    args.heads = args.heads or [128, 16]
    if args.mode == "serve":
        args.layers = depths_of(args.heads[0], args.layers)[:1]
    if args.cache_gib is None and (args.mode == "steps" or args.together):
        args.cache_gib = CACHE_GIB
    if sparse:
        args.batches = args.batches or list(SPARSE_BATCHES)
        args.contexts = args.contexts or list(SPARSE_CONTEXTS)
    return args


def _refuse_without_effect(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Before anything starts: else what is measured is not what was asked for."""
    for cause in (f"--mode {args.mode}", "--as-is" * args.as_is, "--reduced" * args.reduced):
        for name in WITHOUT_EFFECT.get(cause, ()):
            if vars(args)[name] != parser.get_default(name):
                parser.error(f"--{name.replace('_', '-')} has no effect with {cause}")


def is_some(args: argparse.Namespace) -> bool:
    """Whether less is measured than by default, or other work: other layers and repetitions do not
    count, nor what has a name of its own (Report.stem)."""
    words = ["--mode", args.mode, "--family", args.family, "--kv-cache-dtype", args.kv_cache_dtype]
    whole = parse_arguments(words)
    if lacks(args.backends, whole.backends) or is_other(args, whole):
        return True
    if args.mode == "serve":
        mine, every = (
            loads(a.shapes, a.concurrency, a.rates, reduced=a.reduced) for a in (args, whole)
        )
        return lacks(mine, every)
    mine, every = (step_cases(a.batches, a.contexts) for a in (args, whole))
    return lacks(mine, every) or (not args.as_is and lacks(args.heads, whole.heads))


def is_other(args: argparse.Namespace, whole: argparse.Namespace) -> bool:
    """Whether the engines are of another model than those of `whole`, or are launched otherwise."""
    options = ("dtype", "eager", "compile", "server_options")
    if any(vars(args)[name] != vars(whole)[name] for name in options):
        return True
    return not args.as_is and args.model.resolve() != whole.model.resolve()


def not_whole(rows: list[Row]) -> str:
    """The note of results for some of which no time was left; "" if there are none."""
    late = sum("not_profiled" in row for row in rows)
    profiles = f"Not whole: {NO_TIME} to profile {late} rows." if late else ""
    return " ".join(filter(None, (shortage(rows), profiles)))


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    from serve_results import markdown, write_pages, write_results, write_so_far

    if args.report:
        from serve_gate import withhold

        again = Report.read(args.report)
        again.rows = withhold(again.rows)  # a run that was killed had not come to that
        write_pages(again, args.report.with_suffix(""))
        return 0
    claim(args.results)
    exit_on_signals()
    from machine import describe_machine

    settings = {k: _plain(v) for k, v in vars(args).items() if k not in ("results", "report")}
    report = Report(args.mode, command("serve", argv), describe_machine(), settings, note=CUT_OFF)

    def save(row: Row) -> None:
        report.add(row)
        print(json.dumps({k: v for k, v in row.items() if k != "top_kernels_us"}), flush=True)
        write_so_far(report, args.results)

    from serve_gate import withhold

    if args.mode == "steps":
        from serve_steps import run
    else:
        from serve_load import run
    try:
        run(args, save)
        report.note = not_whole(report.rows)
    finally:
        report.rows = withhold(report.rows)
        some = bool(report.note) or is_some(args)
        write_results(report, args.results, PARTIAL if some else "")
    if not some:
        take_away(args.results, report.stem)
    print(markdown(report))
    return exit_code(report.rows)


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, Path):
        return value.name
    return value if isinstance(value, (int, float, str, bool, type(None))) else str(value)


if __name__ == "__main__":
    sys.exit(main())
