# SPDX-License-Identifier: Apache-2.0
"""`serve.py --mode serve`: one server after the other, each under closed and open loops."""

import argparse
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
    longest = max(1024, *(shape.input_len + shape.output_len for shape in args.shapes))
    options = ["--served-model-name", NAME, "--dtype", args.dtype, "--load-format", "dummy"]
    options += ["--tokenizer", str(tokenizer), "--block-size", "64"]
    # The random prompts are text: a few tokens more or less when they are read again.
    options += ["--max-model-len", str(longest + 256), "--max-num-seqs", str(max(args.concurrency))]
    # Random prompts share nothing, and hits would be no comparison of attention.
    options += ["--no-enable-prefix-caching"]
    if not args.compile:
        options += ["--compilation-config", '{"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}']
    return [*options, *args.server_options]


def gpu_memory_gib() -> float | None:
    """Memory in use on the first GPU, by whatever process."""
    used = nvidia_smi("memory.used")
    return float(used[0][0]) / 1024 if used else None


def run(args: argparse.Namespace, save: Callable[[Row], None]) -> None:
    """Measure; rows go to `save`."""
    deadline = time.monotonic() + args.time_limit
    tokenizer = args.model
    if not (args.model / "tokenizer.json").exists():
        tokenizer = demo_model_path("v3")
    options = server_options(args, tokenizer)
    rates: dict[Shape, list[float]] = {}
    said: list[int] | None = None
    with tempfile.TemporaryDirectory() as logs:
        for backend in args.backends:
            log = Path(logs) / f"{backend}.log"
            before = gpu_memory_gib()
            with Server(backend, args.model, options, log) as server:
                start = time.monotonic()
                try:
                    server.wait_ready()
                except RuntimeError as error:
                    save({"backend": backend, "error": f"{error}: {last_error(log)}"})
                    continue
                tokens = greedy_tokens(server.url, NAME, GATE_PROMPTS, GATE_TOKENS)
                said = said or tokens
                row: Row = {"backend": backend, "start_s": time.monotonic() - start}
                row["same_tokens_as_first"] = agreement(said, tokens)
                after = gpu_memory_gib()
                if before is not None and after is not None:
                    row["gpu_memory_gib"] = after - before
                save(row)
                Loads(args, server, tokenizer, rates, deadline, save).run()


def last_error(log: Path) -> str:
    lines = [line for line in log.read_text().splitlines() if "Error" in line]
    return lines[-1][-300:] if lines else ""


class Loads:
    """All loads of one server. The first server's closed loops set the rates of all open ones."""

    def __init__(
        self,
        args: argparse.Namespace,
        server: Server,
        tokenizer: Path,
        rates: dict[Shape, list[float]],
        deadline: float,
        save: Callable[[Row], None],
    ) -> None:
        self.args = args
        self.server = server
        self.tokenizer = tokenizer
        self.rates = rates
        self.deadline = deadline
        self.save = save

    def run(self) -> None:
        for shape in self.args.shapes:
            self._load(shape, None, concurrency=max(self.args.concurrency), requests=2)  # warms up
            fullest = 0.0
            for concurrency in self.args.concurrency:
                requests = concurrency * self.args.rounds
                key = {"loop": "closed", "concurrency": concurrency}
                row = self._load(shape, key, concurrency=concurrency, requests=requests)
                fullest = max(fullest, row.get("request_s", 0.0))
            if self.args.rates is not None:
                self.rates[shape] = self.args.rates
            shares = [round(fullest * share, 3) for share in OPEN_SHARES]
            for rate in self.rates.setdefault(shape, shares):
                key = {"loop": "open", "rate": rate}
                self._load(shape, key, rate=rate, requests=self.args.open_requests)

    def _load(self, shape: Shape, key: Row | None, **load: Any) -> Row:
        row: Row = {"backend": self.server.backend, "shape": str(shape), **(key or {})}
        if time.monotonic() > self.deadline:
            row["not_run"] = "no time was left"
        else:
            row |= run_load(
                self.server.url,
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
