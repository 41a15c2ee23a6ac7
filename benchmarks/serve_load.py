# SPDX-License-Identifier: Apache-2.0
"""`serve.py --mode serve`: servers under closed and open loops, one after the other or in turns."""

import argparse
import contextlib
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from load import agreement, greedy_tokens, run_load
from machine import nvidia_smi
from mla_serving.demo_model import demo_model_path
from serve_cases import Shape
from servers import Server

NAME = "model"
GATE_PROMPTS = (5, 64, 65, 700)
GATE_TOKENS = 32
OPEN_SHARES = (0.5, 0.8)  # of the request rate of our fullest closed loop
Row = dict[str, Any]


def server_options(args: argparse.Namespace, tokenizer: Path) -> list[str]:
    """Options of every server alike."""
    share = len(args.backends) if args.together else 1
    longest = max(1024, *(shape.input_len + shape.output_len for shape in args.shapes))
    options = ["--served-model-name", NAME, "--dtype", args.dtype, "--load-format", "dummy"]
    options += ["--tokenizer", str(tokenizer), "--block-size", "64"]
    # The random prompts are text: a few tokens more or less when they are read again.
    options += ["--max-model-len", str(longest + 256), "--max-num-seqs", str(max(args.concurrency))]
    # Random prompts share nothing, and hits would be no comparison of attention.
    options += ["--no-enable-prefix-caching"]
    options += ["--gpu-memory-utilization", f"{0.9 / share:.3f}"]
    if not args.compile:
        options += ["--compilation-config", '{"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}']
    return [*options, *args.server_options]


def gpu_memory_gib() -> float | None:
    """Memory in use on the first GPU, by whatever process."""
    used = nvidia_smi("memory.used")
    return float(used[0][0]) / 1024 if used else None


def run(args: argparse.Namespace, save: Callable[[Row], None]) -> None:
    """Measure; rows go to `save`."""
    tokenizer = args.model
    if not (args.model / "tokenizer.json").exists():
        tokenizer = demo_model_path("v3")
    options = server_options(args, tokenizer)
    loads = Loads(args, tokenizer, save)
    groups = [args.backends] if args.together else [[backend] for backend in args.backends]
    with tempfile.TemporaryDirectory() as logs:
        for group in groups:
            with contextlib.ExitStack() as stack:
                before = gpu_memory_gib()
                servers = [
                    stack.enter_context(
                        Server(backend, args.model, options, Path(logs) / f"{backend}.log")
                    )
                    for backend in group
                ]
                started = [server for server in servers if loads.ready(server)]
                after = gpu_memory_gib()
                if before is not None and after is not None:
                    save({"backend": " + ".join(group), "gpu_memory_gib": after - before})
                loads.run(started)


def last_error(log: Path) -> str:
    lines = [line for line in log.read_text().splitlines() if "Error" in line]
    return lines[-1][-300:] if lines else ""


class Loads:
    """All loads, on one server or on several in turns. The first server's closed loops set the
    rates of all open ones."""

    def __init__(
        self, args: argparse.Namespace, tokenizer: Path, save: Callable[[Row], None]
    ) -> None:
        self.args = args
        self.tokenizer = tokenizer
        self.save = save
        self.deadline = time.monotonic() + args.time_limit
        self.rates: dict[Shape, list[float]] = {}
        self.said: list[int] | None = None

    def ready(self, server: Server) -> bool:
        """Wait for it and ask it the prompts of the gate; False if it did not start."""
        start = time.monotonic()
        try:
            server.wait_ready()
        except RuntimeError as error:
            print(server.log.read_text()[-4000:], file=sys.stderr)
            reason = f"{error}: {last_error(server.log)}"
            self.save({"backend": server.backend, "error": reason})
            return False
        tokens = greedy_tokens(server.url, NAME, GATE_PROMPTS, GATE_TOKENS)
        self.said = self.said or tokens
        row: Row = {"backend": server.backend, "start_s": time.monotonic() - start}
        self.save({**row, "same_tokens_as_first": agreement(self.said, tokens)})
        return True

    def run(self, servers: list[Server]) -> None:
        """Each load on every server before the next load."""
        for shape in self.args.shapes:
            for server in servers:
                self._load(server, shape, None, concurrency=max(self.args.concurrency), requests=2)
            fullest = 0.0
            for concurrency in self.args.concurrency:
                key = {"loop": "closed", "concurrency": concurrency}
                for place, server in enumerate(servers):
                    requests = concurrency * self.args.rounds
                    row = self._load(server, shape, key, concurrency=concurrency, requests=requests)
                    if place == 0:
                        fullest = max(fullest, row.get("request_s", 0.0))
            shares = [round(fullest * share, 3) for share in OPEN_SHARES]
            asked = shares if self.args.rates is None else self.args.rates
            for rate in self.rates.setdefault(shape, asked):
                for server in servers:
                    key = {"loop": "open", "rate": rate}
                    self._load(server, shape, key, rate=rate, requests=self.args.open_requests)

    def _load(self, server: Server, shape: Shape, key: Row | None, **load: Any) -> Row:
        row: Row = {"backend": server.backend, "shape": str(shape), **(key or {})}
        if time.monotonic() > self.deadline:
            row["not_run"] = "no time was left"
        else:
            row |= run_load(
                server.url,
                self.args.model,
                served_name=NAME,
                input_len=shape.input_len,
                output_len=shape.output_len if key else 2,
                tokenizer=self.tokenizer,
                slo=self.args.slo,
                seed=len(str(shape)) + load["requests"],
                **load,
            )
        if key:
            self.save(row)
        return row
