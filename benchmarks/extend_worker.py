# SPDX-License-Identifier: Apache-2.0
"""One vLLM engine in a process of its own that times first tokens behind a cached prefix.

    python benchmarks/extend_worker.py '{"engine": {...}}'

Speaks as step_worker.py does:

    {"do": "build"}                  the engine, in this process
    {"do": "time", "turn": 0, "context": 8192, "new": 64, "repeats": 3}
                                     milliseconds to the first token, and logprobs of the LIKELY
                                     first tokens; each turn has prompts of its own
"""

import os
import random
import time
from typing import Any

from step_worker import serve, synchronize
from telling import TELLING, register_weights

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

Row = dict[str, Any]
VOCAB = 2000
LIKELY = 20


class Worker:
    """Answers the commands."""

    def __init__(self, options: Row) -> None:
        self.options = options
        self.llm: Any = None

    def answer(self, command: Row) -> Row:
        if command.pop("do") == "build":
            self.llm = make_engine(self.options)
            return {}
        return self.time(**command)

    def time(self, turn: int, context: int, new: int, repeats: int) -> Row:
        """The first request fills the cache, the second warms up."""
        prefix = numbers(f"{context}", context)
        self.first_token(f"fill-{context}-{new}-{turn}", [*prefix, 4])
        found = []
        for i in range(1 + repeats):
            name = f"{context}-{new}-{turn}-{i}"
            ms, logprobs, cached = self.first_token(name, prefix + numbers(name, new))
            if cached != context:
                raise RuntimeError(f"{cached} tokens were cached, expected {context}")
            found.append((ms, logprobs))
        return {"ms": [ms for ms, _ in found[1:]], "logprobs": [logprobs for _, logprobs in found]}

    def first_token(self, name: str, prompt: list[int]) -> tuple[float, dict[int, float], int]:
        """Milliseconds, {token: logprob} and cached tokens of one request alone in the engine."""
        from vllm import SamplingParams

        engine, finished = self.llm.llm_engine, []
        params = SamplingParams(temperature=0, max_tokens=1, logprobs=LIKELY, detokenize=False)
        start = time.perf_counter()
        engine.add_request(name, {"prompt_token_ids": prompt}, params)
        while not finished:
            finished = [output for output in engine.step() if output.finished]
        ms = 1e3 * (time.perf_counter() - start)
        while engine.has_unfinished_requests():
            engine.step()
        synchronize()
        (answer,) = finished[0].outputs
        (said,), (top,) = answer.token_ids, answer.logprobs
        # Its own token first, as serve_gate.drift wants it.
        logprobs = {said: top[said].logprob} | {token: one.logprob for token, one in top.items()}
        return ms, logprobs, finished[0].num_cached_tokens


def make_engine(options: Row) -> Any:
    """vLLM with our plugin registered, whether or not it is installed."""
    from vllm import LLM

    from mla_backend.plugin import register

    register()
    register_weights()
    return LLM(skip_tokenizer_init=True, load_format=TELLING, enable_prefix_caching=True, **options)


def numbers(seed: str, count: int) -> list[int]:
    """Token ids, the same for every engine."""
    rng = random.Random(seed)
    return [rng.randrange(5, VOCAB) for _ in range(count)]


if __name__ == "__main__":
    serve(Worker)
