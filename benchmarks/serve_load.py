# SPDX-License-Identifier: Apache-2.0
"""`serve.py --mode serve`: servers under closed and open loops, one after the other or in turns."""

import argparse
import contextlib
import itertools
import json
import math
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import serve_gate
from ending import NO_TIME
from load import make_prompts, run_load
from machine import nvidia_smi
from mla_serving.demo_model import FAMILIES, demo_model_path
from serve_cases import FEWEST, Load, Shape, dense_overrides, loads
from servers import Server, StartError
from telling import TELLING

NAME = "model"
STEP_TOKENS = 8192  # that vLLM takes at a time, at most
# For most of these vLLM has a configuration of the experts' kernel, if any for the model and GPU.
TUNED = (16, 24, 32, 48, 64, 96, 128, 256, 512, 1024, 1536, 2048, 3072, 4096, STEP_TOKENS)
LATE_SECONDS = 600  # for a load that began in time
WARM_UP_STEPS = 4  # full ones of each shape, for those of other sizes between them
Row = dict[str, Any]


def server_options(args: argparse.Namespace, asked: list[Load], tokenizer: Path) -> list[str]:
    """Options of every server alike."""
    share = len(args.backends) if args.together else 1
    longest = max(1024, *(load.shape.input_len + load.shape.output_len for load in asked))
    clients = max(load.concurrency or 1 for load in asked)
    options = ["--served-model-name", NAME, "--dtype", args.dtype, "--load-format", TELLING]
    options += ["--tokenizer", str(tokenizer), "--block-size", "64"]
    # The random prompts are text: a few tokens more or less when they are read again.
    options += ["--max-model-len", str(longest + 256), "--max-num-seqs", str(clients)]
    # Random prompts share nothing, and hits would be no comparison of attention.
    options += ["--no-enable-prefix-caching", "--jit-monitor-verbose"]
    options += ["--gpu-memory-utilization", f"{0.9 / share:.3f}"]
    if args.cache_gib is not None:  # what is left of the GPU changes while others start
        options += ["--kv-cache-memory-bytes", str(int(args.cache_gib * 2**30))]
    overrides = {} if args.as_is else dense_overrides(args.layers[0], args.heads[0])
    if tokenizer != args.model:
        # For a token that the tokenizer lacks, vLLM would decode the whole prompt again.
        overrides["vocab_size"] = FAMILIES["v3"]["vocab_size"]
    options += ["--hf-overrides", json.dumps(overrides)] if overrides else []
    if args.kv_cache_dtype != "auto":
        options += ["--kv-cache-dtype", args.kv_cache_dtype]
    if args.eager:
        options += ["--enforce-eager"]
    elif not args.compile:
        options += ["--compilation-config", '{"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}']
    return [*options, *args.server_options]


def step_sizes(longest: int) -> list[int]:
    """Tokens of steps whose kernels may differ: TUNED, and one less, which 16 does not divide, so
    that Triton compiles again."""
    pairs = itertools.chain.from_iterable((size - 1, size) for size in TUNED)
    return [size for size in pairs if size <= longest]


def gpu_memory_gib(pids: set[int]) -> float | None:
    """GPU memory of these processes; None where the driver does not say."""
    used = [row for row in nvidia_smi("pid", "used_memory", of="compute-apps") if len(row) == 2]
    mine = [float(mib) for pid, mib in used if mib.isdigit() and int(pid) in pids]
    return sum(mine) / 1024 if mine else None


def run(args: argparse.Namespace, save: Callable[[Row], None]) -> None:
    """Measure; rows go to `save`."""
    if not nvidia_smi("name"):
        raise SystemExit("this benchmark needs an NVIDIA GPU; on a CPU: make bench")
    deadline = time.monotonic() + args.time_limit
    asked = loads(args.shapes, args.concurrency, args.rates, reduced=args.reduced)
    tokenizer = args.model
    if not (args.model / "tokenizer.json").exists():
        tokenizer = demo_model_path("v3")
    options = server_options(args, asked, tokenizer)
    groups = [args.backends] if args.together else [[backend] for backend in args.backends]
    with tempfile.TemporaryDirectory() as folder:
        runner = Runner(args, asked, tokenizer, deadline, save)
        for to_come, group in zip(range(len(groups), 0, -1), groups, strict=True):
            # As much for each as is left, so that a run short of time compares them by some loads.
            now = time.monotonic()
            runner.deadline = now + (deadline - now) / to_come
            if now > deadline:
                runner.leave_out(group)
                continue
            with contextlib.ExitStack() as stack:
                # Left after the servers, whose end ends the waiting for them.
                pool = stack.enter_context(ThreadPoolExecutor(len(group)))
                servers = [
                    stack.enter_context(
                        Server(backend, args.model, options, Path(folder) / f"{backend}.log")
                    )
                    for backend in group
                ]
                # At once: prompts, and what others say, take time that is not a server's own.
                waits = {pool.submit(server.wait_ready): server for server in servers}
                runner.prepare()
                # One that fails says so at once, not when those before it have started.
                failed = {waits[w] for w in as_completed(waits) if runner.failed(waits[w], w)}
                ready = [(server, wait) for wait, server in waits.items() if server not in failed]
                started = [server for server, wait in ready if runner.ready(server, wait.result())]
                for server in started:
                    runner.warm_up(server)
                warm = {server.backend: server.compiled_late() for server in started}
                runner.run(started)
                for server in started:
                    late, before = server.compiled_late(), warm[server.backend]
                    if server.backend in runner.measured and late is not None:
                        late -= before or Counter()
                        # A Counter's keys become pairs in dataclasses.asdict.
                        save({"backend": server.backend, "compiled_in_loads": dict(late)})
                    if (gib := gpu_memory_gib(server.pids)) is not None:
                        save({"backend": server.backend, "gpu_memory_gib": gib})
                for server in servers:
                    server.terminate()


@dataclass
class Runner:
    """All loads, on one server or on several in turns. The first server's closed loops set the
    rates of all open ones."""

    args: argparse.Namespace
    asked: list[Load]
    tokenizer: Path
    deadline: float
    save: Callable[[Row], None]
    fullest: dict[Shape, float] = field(default_factory=dict)  # requests a second
    rates: dict[Load, float] = field(default_factory=dict)  # of open loops by `share`
    measured: set[str] = field(default_factory=set)  # backends with a load
    first: str | None = None
    said: list[serve_gate.Answer] | None = None

    def requests(self, load: Load) -> int:
        if load.concurrency is None:
            return int(self.args.open_requests)
        return max(int(load.concurrency * self.args.rounds), FEWEST)

    def prepare(self) -> None:
        """Make the prompts of all loads, while the servers start."""
        for repetition, load in itertools.product(range(self.args.repetitions), self.asked):
            make_prompts(self.args.model, **self._describe(load, repetition))

    def failed(self, server: Server, wait: Future[float]) -> bool:
        """Whether a server did not start, by `wait`, its `wait_ready`, which is over."""
        try:
            wait.result()
        except StartError as error:
            self.save({"backend": server.backend, "error": str(error)})
            return True
        return False

    def ready(self, server: Server, seconds: float) -> bool:
        """Ask a server that started in `seconds` the prompts of the gate; False if it is not to be
        measured."""
        row: Row = {"backend": server.backend, "start_s": seconds}
        most = serve_gate.tolerance(self.args.kv_cache_dtype, self.args.backends)
        try:
            answers = serve_gate.ask(server.url, NAME)
            self.said = self.said or answers
            nats = serve_gate.drift(self.said, answers)
            red = "" if nats <= most else f"differs from the first server by {nats:.2g} nats"
        except ValueError as error:
            nats, red = math.inf, f"gave no answer: {error}"
        row["nats_from_first"] = nats if math.isfinite(nats) else None
        self.save(row | ({"red": True} if red else {}))
        if red:
            self.save({"backend": server.backend, "error": red})
        return not red

    def warm_up(self, server: Server) -> None:
        """Two tokens to a prompt of each of many lengths, alone, and to some of each shape,
        together. What the first server compiles for steps of other sizes the others then find."""
        for length in step_sizes(max(load.shape.input_len for load in self.asked)):
            if time.monotonic() > self.deadline:
                return
            ask: Row = {"model": NAME, "prompt": serve_gate.prompt(length), "max_tokens": 2}
            try:
                serve_gate.complete(server.url, **ask)
            except ValueError:  # loads say what it cannot answer
                break
        for load in {load.shape: load for load in self.asked}.values():
            some = max(WARM_UP_STEPS, WARM_UP_STEPS * STEP_TOKENS // load.shape.input_len)
            few = {"requests": min(some, self.requests(load)), "output_len": 2}
            left = self.deadline - time.monotonic() + LATE_SECONDS
            run_load(server.url, self.args.model, seconds=left, **self._describe(load, -1) | few)

    def run(self, servers: list[Server]) -> None:
        """Each load on every server before the next load, and all of that once more for each
        repetition. Another server begins each time: none is always measured first."""
        if not servers:
            return
        self.first = self.first or servers[0].backend
        for repetition, (at, load) in itertools.product(
            range(self.args.repetitions), enumerate(self.asked)
        ):
            begin = (repetition + at) % len(servers)
            for server in servers[begin:] + servers[:begin]:
                row = self._measure(server, load, repetition)
                if server.backend == self.first and load.concurrency and "request_s" in row:
                    most = max(row["request_s"], self.fullest.get(load.shape, 0.0))
                    self.fullest[load.shape] = most

    def leave_out(self, backends: list[str]) -> None:
        """Say of all loads of these that no time was left."""
        for load in self.asked:
            for backend in backends:
                self.save(self._row(backend, load) | {"not_run": NO_TIME})

    def _row(self, backend: str, load: Load) -> Row:
        """Which load of which server."""
        row: Row = {"backend": backend, "shape": str(load.shape)}
        rate = load.rate
        if load.concurrency is not None:
            row |= {"loop": "closed", "concurrency": load.concurrency}
        else:
            if load.share is not None and load.shape in self.fullest:
                # Of the first time: fuller loops that came since change no repetition.
                share = round(load.share * self.fullest[load.shape], 3)
                rate = self.rates.setdefault(load, share)
            row |= {"loop": "open", "rate": rate}
        return row

    def _measure(self, server: Server, load: Load, repetition: int) -> Row:
        row = self._row(server.backend, load)
        rate = row.get("rate")
        if time.monotonic() > self.deadline:
            row["not_run"] = NO_TIME
        elif load.concurrency is None and rate is None:
            row["not_run"] = "no closed loop of that shape was run on the first server"
        else:
            how = self._describe(load, repetition) | {"concurrency": load.concurrency, "rate": rate}
            left = self.deadline - time.monotonic() + LATE_SECONDS
            measured = run_load(server.url, self.args.model, seconds=left, **how)
            if measured["failed"]:
                failed = f"{measured['failed']} of {how['requests']} requests failed"
                row["error"] = f"{failed}: {measured['reason']}"
            else:
                row |= measured
                self.measured.add(server.backend)
        self.save(row)
        return row

    def _describe(self, load: Load, repetition: int) -> Row:
        """Arguments of `run_load`; repetition -1 is the warm-up."""
        return {
            "served_name": NAME,
            "requests": self.requests(load),
            "input_len": load.shape.input_len,
            "output_len": load.shape.output_len,
            "tokenizer": self.tokenizer,
            "slo": self.args.slo,
            "temperature": 1,  # greedy answers of random weights repeat one token
            # No prompt is sent twice to a server, which may be told to cache prefixes.
            "seed": 1 + self.asked.index(load) + (1 + repetition) * len(self.asked),
        }
