# SPDX-License-Identifier: Apache-2.0
"""Minutes of mixed load on a real server: does anything break, leak or turn into NaN?

    python benchmarks/soak.py [--minutes 30] [--max-model-len 65536] [--model DIR]

Completions of random lengths, streamed or not, clients that leave, bad requests, greedy probes with
known answers, and a cache so small that requests are preempted. Ends with one line; the exit status
is 1 if anything was wrong. Writes soak.json and soak.md to results/cpu or h200 beside this file; of
less than 30 minutes, and as it goes, it is soak_partial: a soak that is killed leaves what it had
seen. SIGTERM ends the load early, and the end is judged as ever; before the load it ends the soak.
"""

import argparse
import asyncio
import json
import os
import random
import shlex
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import psutil
from arguments import checkpoint, count, json_object, not_negative, positive
from ending import exit_on_signals
from machine import describe_machine, nvidia_smi
from mla_serving.demo_model import FAMILIES, demo_model_path, make_demo_model
from mla_serving.demo_model.config import family_config
from outputs import claim, command
from prometheus_client.parser import text_string_to_metric_families
from servers import Server, StartError
from soak_cases import FIRST_TOKEN, LONG_PROBE, NAME, PROBE_TOKENS, Scope
from soak_ledger import End, Ledger, verdict
from soak_load import PATH, REQUEST_SECONDS, Client
from soak_report import MINUTES, Report

BLOCK = 64
IDLE_SECONDS = 60.0
MIB = 1024**2
PREEMPTED = "vllm:num_preemptions_total"
# What reading a server that is not well may raise.
UNREADABLE = (httpx.HTTPError, psutil.Error, LookupError, ValueError, OSError)
# Nats. In bf16 other neighbours in a batch round a random model's logits otherwise. In the model of
# the H200's soak bf16 is off fp32 by 0.11 in half of 3660 tokens, by 0.53 in one of 100, by 0.78 in
# one. Behind 64 wrong tokens of 732 half of the last 32 move by 4.4 and more, the largest by 10;
# behind a single one half by 0.1 to 2.3, the largest by 0.7 to 7 (soak_rounding.py).
TOLERANCE = {"float32": 1e-3, "bfloat16": 1.0}
Row = dict[str, Any]


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    gpu = bool(nvidia_smi("name"))
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--minutes", type=positive, default=MINUTES)
    parser.add_argument(
        "--model", type=checkpoint, help="default: a demo model of the context asked for"
    )
    parser.add_argument(
        "--overrides", type=json_object, default={}, help="of the demo model's config.json"
    )
    parser.add_argument("--dtype", choices=TOLERANCE, default="bfloat16" if gpu else "float32")
    parser.add_argument("--max-model-len", type=count, default=8192)
    parser.add_argument("--concurrency", type=count, default=32)
    parser.add_argument("--longest-answer", type=count, default=1024 if gpu else 512)
    step = parser.add_argument(
        "--max-num-batched-tokens", type=count, default=8192 if gpu else 1024
    )
    step.help = "of a step; few cut long prompts, and answers go on meanwhile"
    parser.add_argument("--eager", action="store_true", default=not gpu, help="default on a CPU")
    parser.add_argument("--blocks", type=count, help="of cache; default: 1.1 contexts")
    parser.add_argument("--tolerance", type=not_negative, help="of probes under load, nats")
    parser.add_argument("--sample-seconds", type=positive, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--server-options", type=shlex.split, default=[], help="more, in quotes")
    default = Path(__file__).parent / "results" / ("h200" if gpu else "cpu")
    parser.add_argument("--results", type=Path, default=default)
    args = parser.parse_args(argv)
    if args.max_model_len < (least := LONG_PROBE + PROBE_TOKENS):
        parser.error(
            f"expected --max-model-len of {least} or more, what a probe takes, got "
            f"{args.max_model_len}"
        )
    if args.model and args.overrides:
        parser.error(
            f"expected --model or --overrides, which are of the demo model, got {args.model} and "
            f"{json.dumps(args.overrides)}"
        )
    try:
        family_config("v3", args.overrides)
    except ValueError as error:
        parser.error(f"--overrides: {error}")
    if args.tolerance is None:  # 0 is bit for bit
        args.tolerance = TOLERANCE[args.dtype]
    args.blocks = args.blocks or 1 + -(-args.max_model_len * 11 // (10 * BLOCK))  # 1 is padding
    return args


def make_model(args: argparse.Namespace, scratch: Path) -> Path:
    """The demo model of the family v3, stretched to the context."""
    rope = FAMILIES["v3"]["rope_scaling"]
    reach = rope["original_max_position_embeddings"]
    longer = {
        "max_position_embeddings": args.max_model_len,
        "rope_scaling": {**rope, "factor": -(-args.max_model_len // reach)},
    }
    return make_demo_model("v3", scratch / "model", overrides=longer | args.overrides)


def server_options(args: argparse.Namespace, model: Path) -> list[str]:
    options = ["--served-model-name", NAME, "--dtype", args.dtype]
    options += ["--max-model-len", str(args.max_model_len)]
    options += ["--num-gpu-blocks-override", str(args.blocks)]
    options += ["--max-num-batched-tokens", str(args.max_num_batched_tokens)]
    options += ["--enforce-eager"] if args.eager else []
    if not list(model.glob("*.safetensors")):
        options += ["--load-format", "dummy", "--tokenizer", str(demo_model_path("v3"))]
    return [*options, *args.server_options]


class Watch:
    """Reads the server from outside: its routes and the memory of its processes."""

    def __init__(self, http: httpx.AsyncClient, pid: int, ledger: Ledger) -> None:
        self.http = http
        self.ledger = ledger
        self.start = time.monotonic()
        self.server = psutil.Process(pid)

    async def metrics(self) -> dict[str, float]:
        """vLLM's metrics by name, summed over engines."""
        sums: dict[str, float] = {}
        text = (await self.http.get("/metrics")).text
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
        return sums

    def memory(self) -> Row:
        engine = sum(child.memory_info().rss for child in self.server.children(recursive=True))
        row = {"server_mib": self.server.memory_info().rss / MIB, "engine_mib": engine / MIB}
        if used := nvidia_smi("memory.used"):
            row["gpu_mib"] = sum(float(gpu[0]) for gpu in used)
        return row

    async def sample(self) -> None:
        """One row of the ledger."""
        status = (await self.http.get("/health")).status_code
        if status != 200:
            self.ledger.fault(f"/health said {status} under load")
        metrics = await self.metrics()
        row: Row = {
            "time_s": round(time.monotonic() - self.start, 1),
            "kv_cache_usage": round(metrics["vllm:kv_cache_usage_perc"], 3),
            "running": metrics["vllm:num_requests_running"],
            "waiting": metrics["vllm:num_requests_waiting"],
            "preemptions": int(metrics[PREEMPTED]),
        }
        memory = await asyncio.to_thread(self.memory)
        self.ledger.samples.append(row | {k: round(v, 1) for k, v in memory.items()})

    async def run(self, every: float, report: Report) -> None:
        """Sample until cancelled, and report what was seen so far."""
        while True:
            try:
                await self.sample()
            except UNREADABLE as error:
                self.ledger.fault(f"the server cannot be watched: {type(error).__name__}: {error}")
            report.so_far((time.monotonic() - self.start) / 60, self.ledger)
            await asyncio.sleep(every)

    async def info(self) -> Row:
        answer: Row = (await self.http.get("/mla/info")).json()
        return answer

    async def settle(self) -> Row:
        """/mla/info once the engine is idle, or as it is after IDLE_SECONDS."""
        deadline = time.monotonic() + IDLE_SECONDS
        while True:
            # The gauges are those of the last step: a request that was left may not have had one.
            body = {"model": NAME, "prompt": [FIRST_TOKEN], "max_tokens": 2}
            (await self.http.post(PATH, json=body)).raise_for_status()
            info = await self.info()
            busy = info["cache"]["blocks_used"], *info["requests"].values()
            if not any(busy) or time.monotonic() > deadline:
                return info
            await asyncio.sleep(0.5)


async def soak(
    server: Server,
    args: argparse.Namespace,
    scope: Scope,
    report: Report,
) -> tuple[float, Ledger, End | None]:
    """Load the server; returns the minutes it took, what was seen, and the state at the end."""
    ledger = Ledger()
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    limits = httpx.Limits(max_connections=None)
    # A server that hangs, idle before or after the load too, is a fault and not waited for.
    patience = httpx.Timeout(REQUEST_SECONDS)
    async with httpx.AsyncClient(base_url=server.url, timeout=patience, limits=limits) as http:
        watch = Watch(http, server.pid, ledger)
        client = Client(http, ledger, scope, args.tolerance)
        try:
            client.references = await client.probe_idle("before")
            before = await watch.metrics()
            tensors = gpu_mib(await watch.info())
        except UNREADABLE as error:
            ledger.fault(f"before the load: {type(error).__name__}: {error}")
            return 0.0, ledger, None
        start = watch.start = time.monotonic()
        watching = asyncio.create_task(watch.run(args.sample_seconds, report))
        rngs = [random.Random(f"{args.seed}-{i}") for i in range(args.concurrency)]
        asyncio.get_running_loop().call_later(60 * args.minutes, ended.set)
        await asyncio.gather(*(client.work(rng, ended, pause=1.0) for rng in rngs))
        minutes = (time.monotonic() - start) / 60
        watching.cancel()
        (how,) = await asyncio.gather(watching, return_exceptions=True)
        if not isinstance(how, asyncio.CancelledError):
            ledger.fault(f"nobody watched the server to its end: {type(how).__name__}: {how}")
        try:
            end = await final_state(client, watch, before, tensors, server.log)
        except UNREADABLE as error:
            ledger.fault(f"after the load: {type(error).__name__}: {error}")
            end = None
        return minutes, ledger, end


def gpu_mib(info: Row) -> float | None:
    """What the tensors of all workers take on GPUs, from /mla/info; None on a CPU."""
    known = [worker.get("gpu_bytes") for worker in info["attention"]["workers"] or ()]
    return None if None in known or not known else sum(known) / MIB


async def final_state(
    client: Client, watch: Watch, before: dict[str, float], tensors: float | None, log: Path
) -> End:
    """What the server says after the load; before it: `before`, its metrics, and `tensors`, MiB."""
    info = await watch.settle()
    metrics = await watch.metrics()
    same = await client.probe_idle("after") == client.references
    await watch.sample()
    tensors_now = gpu_mib(await watch.info())
    corrupted = metrics.get("vllm:corrupted_requests_total")
    return End(
        blocks_used=info["cache"]["blocks_used"],
        requests_in_engine=sum(info["requests"].values()),
        kv_cache_usage=metrics["vllm:kv_cache_usage_perc"],
        preemptions=int(metrics[PREEMPTED] - before[PREEMPTED]),
        health=(await watch.http.get("/health")).status_code,
        tracebacks=log.read_text().count("Traceback"),
        corrupted=None if corrupted is None else int(corrupted),
        same_probes=same,
        gpu_leak_mib=None if None in (tensors, tensors_now) else tensors_now - tensors,
    )


def describe(args: argparse.Namespace, config: Row, words: list[str] | None) -> Row:
    """The soak itself; `config` is the model's, `words` the command's if not this program's."""
    heads, layers = config["num_attention_heads"], config["num_hidden_layers"]
    return {
        "command": command("soak", words),
        "machine": describe_machine(),
        "model": f"{args.model.name if args.model else 'demo v3'}, {layers} layers, {heads} heads",
        "settings": {k: v for k, v in vars(args).items() if k not in ("results", "model")},
    }


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    claim(args.results)
    exit_on_signals()
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_COMPUTE_NANS_IN_LOGITS", "1")  # of every token, asked for or not
    # oneDNN keeps a kernel for each number of tokens it meets, 1024 of them: no leak, but like one.
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")
    with tempfile.TemporaryDirectory() as scratch:
        model = args.model or make_model(args, Path(scratch))
        config = json.loads((model / "config.json").read_text())
        scope = Scope(args.max_model_len, args.longest_answer, config["vocab_size"])
        log = Path(scratch) / "server.log"
        report = Report(args.results, describe(args, config, argv))
        with Server("ours", model, server_options(args, model), log) as server:
            try:
                server.wait_ready()
            except StartError as error:
                minutes, ledger, end = 0.0, Ledger(), None
                ledger.fault(str(error))
            else:
                minutes, ledger, end = asyncio.run(soak(server, args, scope, report))
                exit_on_signals()  # asyncio left the default in the place of its own handler
        wrong = verdict(ledger, end)
        line = report.write(minutes, ledger, end, wrong)
        report.keep_log(minutes, log if wrong else None)
    for text in wrong:
        print(f"  {text}")
    print(line)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
