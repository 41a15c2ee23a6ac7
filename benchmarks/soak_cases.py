# SPDX-License-Identifier: Apache-2.0
"""The requests of a soak, drawn at random: of any kind, bad ones, and probes."""

import math
import random
from dataclasses import dataclass
from typing import Any

NAME = "soak"  # the served model
ALTERNATIVES = 5  # of each token of a probe
PROBE_TOKENS = 32
LONG_PROBE = 700  # tokens, whatever the context
FIRST_TOKEN = 10  # below are special tokens
KINDS = {"whole": 30, "stream": 30, "leave": 20, "cut": 8, "bad": 6, "probe": 6}
Body = dict[str, Any]


@dataclass(frozen=True)
class Scope:
    """What may be asked for: tokens of prompt and answer together, of an answer, and ids."""

    context: int
    longest_answer: int
    vocabulary: int


@dataclass(frozen=True)
class Case:
    """One request. `patience` is when the client leaves: chunks of a stream, else seconds."""

    kind: str
    request: dict[str, Any]  # of httpx
    patience: float = math.inf
    probe: int = -1

    @property
    def body(self) -> Body:
        return self.request["json"]


def log_uniform(rng: random.Random, most: int) -> int:
    """From 1 to `most`, every power of two as likely as any other."""
    return min(most, int(math.exp(rng.uniform(0, math.log(most + 1)))))


def draw(rng: random.Random, scope: Scope, probes: list[list[int]]) -> Case:
    """A request of any kind."""
    (kind,) = rng.choices(list(KINDS), list(KINDS.values()))
    if kind == "bad":
        return Case(kind, rng.choice(bad_requests(scope)))
    if kind == "probe":
        number = rng.randrange(len(probes))
        return Case(kind, {"json": probe_body(probes[number])}, probe=number)
    length = log_uniform(rng, scope.context - 1)
    prompt = [rng.randrange(FIRST_TOKEN, scope.vocabulary) for _ in range(length)]
    if rng.random() < 0.3:  # shares its beginning with others: prefix hits
        common = random.Random(rng.randrange(4))
        shared = [common.randrange(FIRST_TOKEN, scope.vocabulary) for _ in range(length // 2)]
        prompt[: len(shared)] = shared
    # Not as many short ones: answers that grow are what fills the cache.
    new_tokens = rng.randint(1, min(scope.longest_answer, scope.context - length))
    body: Body = {
        "model": NAME,
        "prompt": prompt,
        "max_tokens": new_tokens,
        "temperature": rng.choice([0, 1]),
        "seed": rng.randrange(1000),
        "ignore_eos": rng.random() < 0.7,
        "return_token_ids": True,
    }
    if rng.random() < 0.5:
        body["logprobs"] = rng.randrange(4)
    if kind in ("stream", "leave"):
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    patience = {"leave": rng.randrange(new_tokens), "cut": rng.uniform(0, 3)}
    return Case(kind, {"json": body}, patience.get(kind, math.inf))


def bad_requests(scope: Scope) -> list[dict[str, Any]]:
    """Each to be refused with 4xx."""
    good = {"model": NAME, "prompt": [FIRST_TOKEN], "max_tokens": 4}
    header = {"content-type": "application/json"}
    wrong: list[Body] = [
        {"model": "none"},
        {"max_tokens": -1},
        {"max_tokens": "many"},
        {"temperature": -1},
        {"top_p": 2},
        {"prompt": [10**6]},
        {"prompt": [FIRST_TOKEN] * (scope.context + 1)},
        {"prompt": "x" * 10_000_000},
    ]
    raw = [b"", b'{"model": ', b"\xff\xfe", b"[]"]
    return [{"json": good | change} for change in wrong] + [
        {"content": content, "headers": header} for content in raw
    ]


def probe_prompts(scope: Scope) -> list[list[int]]:
    """Prompts that are asked again and again: one token, the edge of a block, half the context."""
    lengths = (1, 7, 64, 65, LONG_PROBE, scope.context // 2)
    rngs = [random.Random(length) for length in lengths]
    return [
        [rng.randrange(FIRST_TOKEN, scope.vocabulary) for _ in range(length)]
        for rng, length in zip(rngs, lengths, strict=True)
    ]


def probe_body(prompt: list[int], salt: str | None = None) -> Body:
    """Greedy; with a `salt` of its own it never hits the prefix cache."""
    body: Body = {"model": NAME, "prompt": prompt, "max_tokens": PROBE_TOKENS, "temperature": 0}
    body |= {"ignore_eos": True, "logprobs": ALTERNATIVES, "return_tokens_as_token_ids": True}
    return body | {"return_token_ids": True} | ({"cache_salt": salt} if salt else {})
