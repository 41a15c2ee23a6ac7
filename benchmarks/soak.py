# SPDX-License-Identifier: Apache-2.0
"""Mixed load for a long time: does anything break, leak or turn into NaN?

    python benchmarks/soak.py --minutes 30 [--model DIR] [--cache 4G] [--max-len 65536]

Starts `mla-backend serve` with a cache that is too small for its clients, so that requests are
preempted. Prompts of 1 to --max-len tokens (as many short as long ones), answers of 1 to 256; a
fifth of the clients leave in the middle of an answer. The last line on standard output is the
verdict, and exit status 1 means that it failed.
"""

import argparse
import asyncio
import contextlib
import json
import math
import random
import re
import shlex
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import psutil
from machine import nvidia_smi
from mla_serving.demo_model import demo_model_path
from servers import Server

NAME = "model"
LEAVERS = 0.2
LONGEST_ANSWER = 256
# What caches of allocators and compilers may still grow by after the first third of the time.
MEMORY_GROWTH = 0.05
DRAIN_SECONDS = 120


class Soak:
    """Clients against one server; `seen` counts what happened, `errors` says what went wrong."""

    def __init__(self, url: str, max_len: int, vocab: int, seed: int) -> None:
        self.client = httpx.AsyncClient(base_url=url, timeout=None, limits=httpx.Limits())
        self.max_len = max_len
        self.vocab = vocab
        self.seed = seed
        self.seen: Counter[str] = Counter()
        self.errors: list[str] = []

    async def run(self, clients: int, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        await asyncio.gather(*(self._client(i, deadline) for i in range(clients)))

    async def _client(self, number: int, deadline: float) -> None:
        rng = random.Random(self.seed + number)
        while time.monotonic() < deadline:
            answer = rng.randint(1, min(LONGEST_ANSWER, self.max_len // 2))
            length = round(math.exp(rng.uniform(0, math.log(self.max_len - answer))))
            leave = rng.randint(0, answer) if rng.random() < LEAVERS else None
            try:
                await self._request(rng, length, answer, leave)
            except Exception as error:
                self.errors.append(f"{length} + {answer} tokens: {type(error).__name__}: {error}")

    async def _request(
        self, rng: random.Random, length: int, answer: int, leave: int | None
    ) -> None:
        """One streamed completion; `leave`: hang up after so many events."""
        body = {
            "model": NAME,
            "prompt": [rng.randrange(3, self.vocab) for _ in range(length)],
            "max_tokens": answer,
            "ignore_eos": True,
            "logprobs": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        usage: dict[str, int] = {}
        self.seen["requests"] += 1
        async with self.client.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                text = (await response.aread())[:200].decode(errors="replace")
                raise RuntimeError(f"status {response.status_code}: {text}")
            events = 0
            async for line in response.aiter_lines():
                if leave is not None and events >= leave:
                    self.seen["left"] += 1
                    return
                if line.startswith("data: ") and line != "data: [DONE]":
                    events += 1
                    usage = check_event(json.loads(line[6:])) or usage
        if usage.get("completion_tokens") != answer:
            raise RuntimeError(f"{usage.get('completion_tokens')} tokens")
        self.seen["finished"] += 1

    async def idle(self) -> tuple[int, int]:
        """(requests, blocks) still held by the engine once it has had time to let go of them."""
        deadline = time.monotonic() + DRAIN_SECONDS
        while True:
            info = (await self.client.get("/mla/info")).json()
            requests = sum(info["requests"][kind] or 0 for kind in ("running", "waiting"))
            blocks = info["cache"]["blocks_used"] or 0
            if requests == blocks == 0 or time.monotonic() > deadline:
                return requests, blocks
            # The gauges are those of the last step: a short request makes a new one.
            await self._request(random.Random(0), 1, 1, None)
            await asyncio.sleep(0.5)

    async def preemptions(self) -> int:
        text = (await self.client.get("/metrics")).text
        found = re.findall(r"^vllm:num_preemptions_total\{.*\} ([0-9.e+]+)$", text, re.MULTILINE)
        return int(sum(map(float, found)))


def check_event(event: dict[str, Any]) -> dict[str, int] | None:
    """The usage of the last event. RuntimeError for a logprob that is no number up to 0."""
    for choice in event.get("choices", ()):
        for logprob in (choice.get("logprobs") or {}).get("token_logprobs") or ():
            if logprob is None or not -1e4 < logprob <= 1e-3:
                raise RuntimeError(f"logprob {logprob}")
    usage: dict[str, int] | None = event.get("usage")
    return usage


def memory(server: Server) -> dict[str, float]:
    """MiB of the server's processes and of the GPU."""
    used = {"RSS": 0.0}
    process = psutil.Process(server.pid)
    for one in (process, *process.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            used["RSS"] += one.memory_info().rss / 2**20
    if smi := nvidia_smi("memory.used"):
        used["GPU"] = float(smi[0][0])
    return used


async def watch(server: Server, samples: list[dict[str, float]]) -> None:
    while True:
        samples.append(memory(server))
        await asyncio.sleep(1)


def growth(samples: list[dict[str, float]]) -> dict[str, float]:
    """Largest of the last third over largest of the second third, less 1, for each memory."""
    third = len(samples) // 3
    middle, last = samples[third : 2 * third], samples[2 * third :]
    if not middle:
        return {}
    return {k: max(s[k] for s in last) / max(s[k] for s in middle) - 1 for k in samples[0]}


async def soak(server: Server, args: argparse.Namespace, vocab: int) -> tuple[bool, str]:
    """(passed, the verdict in one line)."""
    run = Soak(server.url, args.max_len, vocab, args.seed)
    samples: list[dict[str, float]] = []
    async with run.client:
        watching = asyncio.create_task(watch(server, samples))
        await run.run(args.clients, 60 * args.minutes)
        watching.cancel()
        seen = Counter(run.seen)
        requests, blocks = await run.idle()
        preempted = await run.preemptions()
    grown = growth(samples)
    passed = not run.errors and requests == blocks == 0
    passed &= seen["finished"] > 0 and all(g < MEMORY_GROWTH for g in grown.values())
    memories = ", ".join(f"{name} {g:+.1%}" for name, g in grown.items()) or "too short to tell"
    for error in run.errors[:10]:
        print(error)
    return passed, (
        f"soak: {'passed' if passed else 'FAILED'}: {args.minutes:g} min, {seen['requests']} "
        f"requests, {seen['left']} left early, {preempted} preemptions, {len(run.errors)} "
        f"errors, {requests} requests and {blocks} blocks left, memory {memories}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--model", type=Path, help="a directory (default: the demo model)")
    parser.add_argument("--max-len", type=int, default=8192, help="prompt and answer together")
    parser.add_argument("--cache", default="64M", help="KV cache; small, so that it runs out")
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--server-options", type=shlex.split, default=[], help="more, in quotes")
    args = parser.parse_args()
    model = args.model or demo_model_path("v3")
    options = ["--served-model-name", NAME, "--max-model-len", str(args.max_len)]
    options += ["--kv-cache-memory-bytes", args.cache, *args.server_options]
    if not list(model.glob("*.safetensors")):
        options += ["--load-format", "dummy", "--tokenizer", str(demo_model_path("v3"))]
    vocab = json.loads((model / "config.json").read_text())["vocab_size"]
    with tempfile.TemporaryDirectory() as logs:
        log = Path(logs) / "server.log"
        with Server("ours", model, options, log) as server:
            server.wait_ready()
            passed, verdict = asyncio.run(soak(server, args, vocab))
        if not passed:
            print(*log.read_text().splitlines()[-30:], sep="\n")
    print(verdict)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
