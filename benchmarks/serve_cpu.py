# SPDX-License-Identifier: Apache-2.0
"""Serving on a CPU: this backend against vLLM's own best one, on one machine in one run.

    python benchmarks/serve_cpu.py [--quick] [--dtype bfloat16 float32] [--concurrency 8 32]

Both servers run the demo model with the same options and are loaded by vLLM's own generator, one
after the other, again and again (ours, stock, ours, stock, ...), because the speed of a shared
machine drifts. Stock's processes poll each other by sched_yield, which on some kernels keeps a few
cores from its HTTP server (docs/plugin.md): a part of the difference that is not attention. Before
any timing, whatever the dtypes, both must give the same greedy tokens in fp32; if they do not,
nothing is measured. A load of which a request failed counts as not measured.
Writes serving.json and serving.md to results/cpu beside this file; of some dtypes or clients,
another model, other lengths or without torch.compile, where the tokens differ, and while it runs,
the same with _partial in their names.
"""

import argparse
import contextlib
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from arguments import count
from cells import FEW_SAMPLES, TIME_HEADS, number, quotient, times
from ending import CUT_OFF, exit_on_signals
from load import METRICS, STATISTICS, agreement, greedy_tokens, run_load
from machine import describe_machine
from mla_serving.demo_model import FAMILIES, demo_model_path
from outputs import claim, command, write, write_json
from partial import PARTIAL, lacks, take_away
from servers import BACKENDS, Server, StartError

NAME = "demo"
# Of sparse attention vLLM has none for a CPU.
DENSE = sorted(family for family, config in FAMILIES.items() if "index_topk" not in config)
DTYPES = ("float32", "bfloat16", "float16")
MAX_MODEL_LEN = 4096
SPARE_TOKENS = 64
GATE_PROMPTS = (5, 64, 65, 200, 700)  # tokens
GATE_TOKENS = 32
# With AMX tiles vLLM chooses AMX_MLA for any dtype, and that does not start with fp32.
STOCK_FP32 = ["--attention-backend", "CPU_MLA"]
# {option: (default, with --quick)}
DEFAULTS = {"repetitions": (5, 2), "output_len": (128, 32)}
DISAGREE = "The backends disagree in fp32: no speed is reported."
Row = dict[str, Any]


def measure(
    dtype: str, args: argparse.Namespace, logs: Path, report: Row, save: Callable[[], None]
) -> Row:
    """What the gate of one dtype saw, which goes into the report as all timed rows do; it is saved
    after each number of clients. No rows when the gate is red, or when nobody asked for fp32, of
    which the gate is needed all the same."""
    model = demo_model_path(args.family)
    options = ["--served-model-name", NAME, "--dtype", dtype]
    # Stock switches prefix caching off for MLA on a CPU; hits would be no comparison of attention.
    options += ["--max-model-len", str(MAX_MODEL_LEN), "--no-enable-prefix-caching"]
    options += ["--enforce-eager"] if args.eager else ["--no-enforce-eager"]
    with contextlib.ExitStack() as stack:
        servers = []
        for backend in BACKENDS:
            own = STOCK_FP32 if backend == "stock" and dtype == "float32" else []
            server = Server(backend, model, options + own, logs / f"{backend}-{dtype}.log")
            servers.append(stack.enter_context(server))
            server.wait_ready()
        said = [greedy_tokens(s.url, NAME, GATE_PROMPTS, GATE_TOKENS) for s in servers]
        gate: Row = {"dtype": dtype, "same_tokens": agreement(*said)}
        gate["attention"] = {server.backend: server.attention() for server in servers}
        print(f"{dtype}: same greedy tokens {gate['same_tokens']:.1%}", gate["attention"])
        report["gates"].append(gate)
        if dtype not in args.dtype or red(gate):
            return gate
        for concurrency in args.concurrency:
            report["rows"] += load_in_turn(servers, model, dtype, concurrency, args)
            save()
    return gate


def load_in_turn(
    servers: list[Server], model: Path, dtype: str, concurrency: int, args: argparse.Namespace
) -> list[Row]:
    """The rows of so many clients: repetitions, and a warm-up (-1) if a request of it failed."""
    rows: list[Row] = []
    for repetition in range(-1, args.repetitions):
        for server in servers:
            row = run_load(
                server.url,
                model,
                served_name=NAME,
                concurrency=concurrency,
                requests=concurrency * (1 if repetition < 0 else args.rounds),
                input_len=args.input_len,
                output_len=args.output_len,
                seed=1000 * concurrency + repetition,
            )
            if repetition < 0 and not row["failed"]:
                continue
            key = {"dtype": dtype, "concurrency": concurrency, "backend": server.backend}
            rows.append({**key, "repetition": repetition, **row})
            said = failure(row) if row["failed"] else f"{row['output_tok_s']:.1f} tok/s"
            print(key, said, flush=True)
    return rows


def failure(row: Row) -> str:
    return f"{row['failed']} requests failed: {row['reason']}"


def red(gate: Row) -> bool:
    """Whether this gate forbids to report a speed: in bf16 near-ties part for rounding alone."""
    return bool(gate["dtype"] == "float32" and gate["same_tokens"] < 1)


def summary(rows: list[Row]) -> list[Row]:
    """Medians over the repetitions of which no request failed, one row per dtype, concurrency and
    backend."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        if row["failed"]:
            continue
        groups.setdefault((row["dtype"], row["concurrency"], row["backend"]), []).append(row)
    names = ["output_tok_s", *(f"{m}_{s}" for m in METRICS for s in STATISTICS)]
    result = []
    for (dtype, concurrency, backend), group in groups.items():
        medians = {name: statistics.median(row[name] for row in group) for name in names}
        spread = [row["output_tok_s"] for row in group]
        key = {"dtype": dtype, "concurrency": concurrency, "backend": backend}
        result.append({**key, **medians, "min_tok_s": min(spread), "max_tok_s": max(spread)})
    return result


def markdown(report: Row) -> str:
    machine, settings = report["machine"], report["settings"]
    lines = [
        "# Serving on a CPU",
        "",
        f"Written by `{report['command']}`. {machine['cpu']}, {machine['cores']} cores, vLLM "
        f"{machine['vllm']}, torch {machine['torch']}, commit {machine['commit']}. Demo model "
        f"{settings['family']}, "
        f"{settings['input_len']} + {settings['output_len']} tokens a request, "
        f"{'eager' if settings['eager'] else 'torch.compile'}. Medians of "
        f"{settings['repetitions']} alternating repetitions; in brackets the least and the most.",
        "",
        *([report["note"], ""] if "note" in report else []),
    ]
    for gate in report["gates"]:
        names = ", ".join(f"{backend} = {name}" for backend, name in gate["attention"].items())
        lines.append(f"* {gate['dtype']}: {gate['same_tokens']:.1%} same greedy tokens ({names})")
    lines += [
        "",
        "Rounding to bf16 moves the near-ties of a model with random weights, and one other token",
        "changes all that follow; the tests compare bf16 log-probabilities with an fp32 oracle.",
    ]
    heads = " | ".join(TIME_HEADS)
    lines += ["", f"| dtype | conc. | backend | output tok/s | {heads} |"]
    lines.append("|---|--:|---|--:|" + "--:|" * len(TIME_HEADS))
    for row in report["summary"]:
        speed = f"{row['output_tok_s']:.0f} ({row['min_tok_s']:.0f}-{row['max_tok_s']:.0f})"
        requests = row["concurrency"] * settings["rounds"]
        cells = [row["dtype"], str(row["concurrency"]), row["backend"], speed]
        cells += times(row, requests, settings["output_len"])
        lines.append("| " + " | ".join(cells) + " |")
    lines += [
        "",
        f"Times in milliseconds. {FEW_SAMPLES}",
        "",
        "Below: how much faster ours is, by output tokens a second (prefill counts too) and by the",
        "median step of a decoding request (ITL p50).",
        "",
        "| dtype | conc. | output tok/s, ours / stock | ITL p50, stock / ours |",
        "|---|--:|--:|--:|",
    ]
    by_key = {(r["dtype"], r["concurrency"], r["backend"]): r for r in report["summary"]}
    for (dtype, concurrency, backend), row in by_key.items():
        stock = by_key.get((dtype, concurrency, "stock"))
        if backend == "ours" and stock:
            tokens = number(quotient(row["output_tok_s"], stock["output_tok_s"]), 2)
            step = number(quotient(stock["itl_p50"], row["itl_p50"]), 2)
            lines.append(f"| {dtype} | {concurrency} | {tokens} | {step} |")
    failed = [row for row in report["rows"] if row["failed"]]
    lines += ["", "Not measured:", ""] * bool(failed)
    for row in failed:
        which = "the warm-up" if row["repetition"] < 0 else f"repetition {row['repetition']}"
        case = f"{row['dtype']}, {row['concurrency']} clients, {row['backend']}"
        lines.append(f"* {case}, {which}: {failure(row)}")
    return "\n".join(lines) + "\n"


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--family", choices=DENSE, default="v3")
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=["float32", "bfloat16"])
    parser.add_argument("--concurrency", nargs="+", type=count, default=[8, 32])
    parser.add_argument("--input-len", type=count, default=256)
    parser.add_argument("--output-len", type=count, help="default: 128, quick 32")
    parser.add_argument("--repetitions", type=count, help="default: 5, quick 2")
    parser.add_argument("--rounds", type=count, default=2, help="requests per client")
    parser.add_argument("--eager", action="store_true", help="without torch.compile, both")
    parser.add_argument("--quick", action="store_true", help="eager, 2 repetitions, short answers")
    default = Path(__file__).parent / "results" / "cpu"
    parser.add_argument("--results", type=Path, default=default)
    args = parser.parse_args(argv)
    args.eager |= args.quick
    for name, values in DEFAULTS.items():
        setattr(args, name, getattr(args, name) or values[args.quick])
    # The random prompts are text: a few tokens more or less when they are read again.
    if args.input_len + SPARE_TOKENS + args.output_len > MAX_MODEL_LEN:
        parser.error(
            f"expected --input-len and --output-len of {MAX_MODEL_LEN - SPARE_TOKENS} or less in "
            f"all, got {args.input_len} and {args.output_len}"
        )
    return args


def is_some(args: argparse.Namespace) -> bool:
    """Whether these are not the loads of the page of all, or not all of them."""
    whole = parse_arguments([])
    same = ("family", "input_len", "output_len", "eager")
    other = any(getattr(args, name) != getattr(whole, name) for name in same)
    return other or any(
        lacks(getattr(args, name), getattr(whole, name)) for name in ("dtype", "concurrency")
    )


def write_report(report: Row, folder: Path, ending: str) -> None:
    """serving.json and .md in `folder`, with `ending` behind their names."""
    write_json(folder / f"serving{ending}.json", report)
    write(folder / f"serving{ending}.md", markdown(report))


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    claim(args.results)
    exit_on_signals()
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    report: Row = {
        "command": command("serve_cpu", argv),
        "machine": describe_machine(),
        "settings": {k: v for k, v in vars(args).items() if k != "results"},
        "gates": [],
        "summary": [],
        "rows": [],
    }

    def save() -> None:
        """What is there stays if a server dies."""
        report["summary"] = summary(report["rows"])
        write_report({**report, "note": CUT_OFF}, args.results, PARTIAL)

    with tempfile.TemporaryDirectory() as logs:
        for dtype in dict.fromkeys(["float32", *args.dtype]):
            try:
                gate = measure(dtype, args, Path(logs), report, save)
            except StartError as error:
                sys.exit(str(error))
            if red(gate):
                print(DISAGREE, file=sys.stderr)
                write_report({**report, "note": DISAGREE}, args.results, PARTIAL)
                return 1
    # Of each load both servers, or what is there already is more.
    every = len(set(args.dtype)) * len(set(args.concurrency)) * len(BACKENDS)
    some = is_some(args) or len(report["summary"]) < every
    write_report(report, args.results, PARTIAL if some else "")
    if not some:
        take_away(args.results, "serving")
    print(markdown(report))
    return 1 if any(row["failed"] for row in report["rows"]) else 0


if __name__ == "__main__":
    sys.exit(main())
