# SPDX-License-Identifier: Apache-2.0
"""Time to the first token of a prompt whose prefix is cached, by the length of what is not.

    python benchmarks/extends.py [--heads 128 16] [--layers 6] [--contexts 2048 8192 32768]
    python benchmarks/extends.py --sparse

This backend as it chooses (absorbed form for short ends), with every end in expanded form
(MLA_BACKEND_EXTEND_TOKENS=0), and on a GPU vLLM's own backends, engines side by side that take
turns. All must agree: the best first tokens of either have nearly the same logprobs in the other
(TOLERANCE); weights are such that attention decides them. An engine that fails is listed, the
others are timed without it. Without a GPU the model is two layers of DeepSeek-V2-Lite. Writes
extends.json and extends.md to results/h200 or cpu beside this file; of some heads, contexts or
ends, and while it runs, the same with _partial in their names.

--sparse: DeepSeek-V3.2's layers and prompts that see at most `index_topk` tokens, in absorbed form
(MLA_BACKEND_EXPAND_PROMPTS=0) and in expanded form (=1, the default); writes sparse_extends.json
and sparse_extends.md likewise. Exits with 1 if a case failed or engines disagree.
"""

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from arguments import count, length, positive
from cells import number
from ending import CUT_OFF, NO_TIME, exit_code, exit_on_signals, shortage
from machine import describe_machine, nvidia_smi
from outputs import claim, command, write, write_json
from partial import PARTIAL, lacks, take_away
from serve_cases import MODEL, SPARSE_MODEL, dense_overrides, heads_of_a_rank
from serve_gate import alone, drift
from step_driver import ROUNDS, Engine, all_ask

UNVOUCHED = "too few engines are left to compare their answers"
ENGINE_FAILED = "Not whole: an engine failed."
WORKER = Path(__file__).with_name("extend_worker.py")
# {name: (vLLM's name, environment)}; the first two are compared with each other.
ENGINES: dict[str, tuple[str, dict[str, str]]] = {
    "absorbed": ("CUSTOM", {}),
    "expanded": ("CUSTOM", {"MLA_BACKEND_EXTEND_TOKENS": "0"}),
    "FLASHMLA": ("FLASHMLA", {}),
    "FLASH_ATTN_MLA": ("FLASH_ATTN_MLA", {}),
}
SPARSE_ENGINES: dict[str, tuple[str, dict[str, str]]] = {
    "absorbed": ("CUSTOM", {"MLA_BACKEND_EXPAND_PROMPTS": "0"}),
    "expanded": ("CUSTOM", {"MLA_BACKEND_EXPAND_PROMPTS": "1"}),
    "FLASHMLA_SPARSE": ("FLASHMLA_SPARSE", {}),
}
OURS = ("absorbed", "expanded")
INDEX_TOPK = json.loads((SPARSE_MODEL / "config.json").read_text())["index_topk"]
CPU_MODEL = MODEL.with_name("deepseek-v2-lite")  # of 16 heads
TOLERANCE = 0.1  # nats: bf16 rounds the two forms differently
Row = dict[str, Any]


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    gpu = bool(nvidia_smi("name"))
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    heads = [128, 16] if gpu else [16]
    parser.add_argument("--heads", nargs="+", type=heads_of_a_rank, default=heads)
    parser.add_argument("--layers", type=count, default=6 if gpu else 2, help="with dense MLPs")
    parser.add_argument("--contexts", nargs="+", type=length, help="tokens that are cached")
    parser.add_argument("--new", nargs="+", type=count, help="tokens behind them")
    parser.add_argument("--repeats", type=count, default=3, help=f"in each of {ROUNDS} turns")
    parser.add_argument("--time-limit", type=positive, default=3600, help="seconds; then it stops")
    default = Path(__file__).parent / "results" / ("h200" if gpu else "cpu")
    parser.add_argument("--results", type=Path, default=default)
    parser.add_argument("--sparse", action="store_true", help="layers of DeepSeek-V3.2")
    args = parser.parse_args(argv)
    engines = SPARSE_ENGINES if args.sparse else ENGINES
    args.engines = {name: engines[name] for name in (engines if gpu else OURS)}
    args.gpu = gpu
    if args.sparse:
        contexts, new = [0, 512, 1024], [128, 512, 1000]
    elif gpu:
        contexts, new = [2048, 8192, 32768], [8, 32, 64, 128]
    else:
        contexts, new = [512, 2048, 4096], [4, 16, 32, 48]
    args.contexts, args.new = args.contexts or contexts, args.new or new
    chosen = ((args.heads, heads), (args.contexts, contexts), (args.new, new))
    args.some = any(lacks(mine, every) for mine, every in chosen)
    longest = max(args.contexts) + max(args.new)
    if args.sparse and longest > INDEX_TOPK:
        parser.error(f"--sparse takes prompts of up to {INDEX_TOPK} tokens, got {longest}")
    return args


def engine_options(args: argparse.Namespace, heads: int) -> Row:
    """Keywords of vllm.LLM, the same for every engine."""
    dense = MODEL if args.gpu else CPU_MODEL
    options: Row = {
        "model": str(SPARSE_MODEL if args.sparse else dense),
        "dtype": "bfloat16",
        "block_size": 64,
        "max_model_len": max(args.contexts) + max(args.new) + 64,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 8192,
        "seed": 0,
    }
    if not args.gpu:
        overrides = dense_overrides(args.layers, heads)
        if not args.sparse:  # its MLP is small as it is
            del overrides["intermediate_size"]
        return options | {"enforce_eager": True, "hf_overrides": overrides}
    return options | {
        "kv_cache_memory_bytes": 6 << 30,
        "gpu_memory_utilization": 0.2,
        "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
        "hf_overrides": dense_overrides(args.layers, heads),
    }


def disagreements(found: dict[str, Row]) -> list[str]:
    """What of the answers is not as the first engine's; each is of one token, the first."""
    answers = {name: [[token] for token in said["logprobs"]] for name, said in found.items()}
    first, *others = found
    apart = {name: drift(answers[first], answers[name]) for name in others}
    return [
        f"{name} differs from {first} by {nats:.2g} nats"
        for name, nats in apart.items()
        if nats > TOLERANCE
    ]


def in_turns(engines: dict[str, Engine], ask: Row) -> dict[str, Row]:
    """Of each engine the median of each turn, in "ms", and the logprobs of all; or its first error.

    A host has slow spells that no engine causes: of short turns the lowest counts, as in
    step_driver.py."""
    found: dict[str, Row] = {name: {"ms": [], "logprobs": []} for name in engines}
    order = list(engines)
    for turn in range(ROUNDS):
        for name in order:
            if "error" in found[name]:
                continue
            said = engines[name].ask("time", turn=turn, **ask)
            if "error" in said:
                found[name] = said
            else:
                found[name]["ms"].append(statistics.median(said["ms"]))
                found[name]["logprobs"] += said["logprobs"]
        order.reverse()  # so that no engine always follows the same one
    return found


def measure(args: argparse.Namespace, heads: int, deadline: float) -> Iterator[Row]:
    """Rows {heads, context, new, ms of each engine} or {..., not_run}, as they come; and
    {heads, backend, error} of each engine that did not start, or failed in the case behind."""
    cases = [
        {"heads": heads, "context": context, "new": new}
        for context in args.contexts
        for new in args.new
    ]
    if time.monotonic() > deadline:  # engines take minutes to build
        yield from (row | {"not_run": NO_TIME} for row in cases)
        return
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        engines = {}
        for name, (backend, env) in args.engines.items():
            options = engine_options(args, heads)
            env = {"VLLM_CPU_KVCACHE_SPACE": "1", **env}
            engine = Engine(backend, options, Path(folder) / f"{name}.log", WORKER, env)
            stack.callback(engine.kill)
            engines[name] = engine
        for engine in engines.values():
            engine.answer()  # that vLLM is imported
        for name, said in zip(list(engines), all_ask(list(engines.values()), "build"), strict=True):
            if "error" in said:
                print(engines.pop(name).log.read_text()[-4000:], file=sys.stderr)
                yield {"heads": heads, "backend": name, **said}
        for row in cases:
            if time.monotonic() > deadline:
                yield row | {"not_run": NO_TIME}
                continue
            for found in time_case(engines, row, args):
                print(json.dumps(found), flush=True)
                yield found


def time_case(engines: dict[str, Engine], row: Row, args: argparse.Namespace) -> Iterator[Row]:
    """`row`, which says of what, with the ms of each engine, or why it was not run. Before it the
    rows of engines that fail in it, which are taken out of `engines`."""
    found: dict[str, Row] = {}
    if not unvouched(engines, args):
        ask = {"context": row["context"], "new": row["new"], "repeats": args.repeats}
        found = in_turns(engines, ask)
    for name in [name for name, said in found.items() if "error" in said]:
        engines.pop(name)
        yield {"heads": row["heads"], "backend": name, "error": found.pop(name)["error"]}
    if unvouched(engines, args):
        yield row | {"not_run": UNVOUCHED}
    elif wrong := disagreements(found):
        yield row | {"not_run": "; ".join(wrong)}
    else:
        yield row | {"ms": {name: min(said["ms"]) for name, said in found.items()}}


def unvouched(engines: dict[str, Engine], args: argparse.Namespace) -> bool:
    """Whether nobody is left to compare answers with."""
    return alone([args.engines[name][0] for name in engines], [e[0] for e in args.engines.values()])


def markdown(result: Row) -> str:
    """The page for a result."""
    machine = ", ".join(f"{k} {v}" for k, v in result["machine"].items())
    engines, sparse = result["engines"], result.get("sparse", False)
    if sparse:
        of, default, other = "layers of DeepSeek-V3.2 with dense MLPs", "expanded", "absorbed"
        told = (
            f"Every prompt sees at most {INDEX_TOPK} tokens, which is what the indexer may choose. "
            "`expanded`: this backend by default; `absorbed`: with MLA_BACKEND_EXPAND_PROMPTS=0."
        )
    else:
        of, default, other = "dense layers of DeepSeek-V2-Lite", "absorbed", "expanded"
        if "gpu" in result["machine"]:
            of = "dense layers of DeepSeek-V3's width"
        told = (
            "`absorbed`: this backend, which takes short ends in absorbed form, by docs/plugin.md; "
            "`expanded`: with MLA_BACKEND_EXTEND_TOKENS=0."
        )
    peers = [name for name in engines if name not in OURS]
    turns = ""
    if "turns" in result:
        turns = f"; the lowest median of {result['turns']} short turns, which engines take in turn"
    lines = [
        "# First token behind a cached prefix",
        "",
        f"{machine}.",
        "",
        f"`{result['command']}`",
        "",
        *([result["note"], ""] if "note" in result else []),
        f"Milliseconds from a request to its first token, alone in the engine: {result['layers']} "
        f"{of}, random weights, bf16{turns}. `context` tokens are in the prefix cache, `new` are "
        f"not. {told}",
        "",
        f"| heads | context | new | {' | '.join(engines)} | {other} / {default} |"
        + (f" best peer / {default} |" if peers else ""),
        "|---" * (4 + len(engines) + bool(peers)) + "|",
    ]
    for row in result["rows"]:
        if "backend" in row:
            continue
        cells = [row["heads"], row["context"], row["new"]]
        if "ms" not in row:
            lines.append(f"| {' | '.join(map(str, cells))} | {first_line(row['not_run'])} |")
            continue
        ms = row["ms"]
        cells += [number(ms.get(name), 2) for name in engines]
        cells.append(ratio(ms, [other], default))
        if peers:
            cells.append(ratio(ms, peers, default))
        lines.append(f"| {' | '.join(map(str, cells))} |")
    failed = [
        f"* heads {row['heads']} backend {row['backend']}: {first_line(row['error'])}"
        for row in result["rows"]
        if "backend" in row
    ]
    if failed:
        lines += ["", "Not measured:", "", *failed]
    return "\n".join([*lines, ""])


def ratio(ms: dict[str, float], over: list[str], under: str) -> str:
    """The cell of the best of `over` that started over `under`; empty if there are no two."""
    found = [ms[name] for name in over if name in ms]
    return f"{min(found) / ms[under]:.2f}" if found and under in ms else ""


def first_line(error: str) -> str:
    """What a table has room for; the JSON has all of it."""
    return error.strip().splitlines()[0]


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    claim(args.results)
    exit_on_signals()
    deadline = time.monotonic() + args.time_limit
    result: Row = {
        "machine": describe_machine(),
        "command": command("extends", argv),
        "layers": args.layers,
        "engines": list(args.engines),
        "sparse": args.sparse,
        "turns": ROUNDS,
        "rows": [],
    }
    name = "sparse_extends" if args.sparse else "extends"

    def save(result: Row, ending: str) -> None:
        write_json(args.results / f"{name}{ending}.json", result)
        write(args.results / f"{name}{ending}.md", markdown(result))

    for heads in args.heads:
        for row in measure(args, heads, deadline):
            result["rows"].append(row)
            save({**result, "note": CUT_OFF}, PARTIAL)
    some = args.some
    failed = ENGINE_FAILED if any("error" in row for row in result["rows"]) else ""
    if note := " ".join(filter(None, (shortage(result["rows"]), failed))):
        some, result["note"] = True, note
    save(result, PARTIAL if some else "")
    if not some:
        take_away(args.results, name)
    return exit_code(result["rows"])


if __name__ == "__main__":
    sys.exit(main())
