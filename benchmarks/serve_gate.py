# SPDX-License-Identifier: Apache-2.0
"""The gate of `serve.py`: what servers, or engines, of the same weights say must be nearly alike.

No reference gives the right answer at these sizes, so each is held to the first one: at every
token, as long as both have said the same, the best of either has nearly the same logprob in the
other. Where they part it is thus at a near tie. The weights (telling.py) let attention decide.
Another of vLLM's backends must vouch for the first: two labels of one backend run the same code, so
a fault may be common to both.
"""

import http.client
import json
import math
import random
import urllib.error
import urllib.request
from typing import Any

from serve_cases import engine_of

# Of unlike lengths, within one block, at its edges, and over several; asked together, as one batch.
PROMPTS = (5, 63, 64, 65, 300, 700)
TOKENS = 16
ANSWER_SECONDS = 300  # by then a server says something: graphs and kernels are compiled before
LIKELY = 20  # logprobs of a token; vLLM gives no more unless told to
# Nats. On a CPU, 30 layers of 16 heads: two sound backends 0.05 in bf16, an fp8 cache from a bf16
# one 0.09, an attention that misses the newest 64 tokens 0.35. On an H200, four engines of such
# layers each: 0.063 in bf16, 0.094 with fp8 caches and queries of either kind.
TOLERANCE, FP8_TOLERANCE = 0.1, 0.25
ALONE = "no other backend gives the same answers"
Answer = list[dict[str, float]]  # of one prompt: for each token logprobs by token, its own first
Row = dict[str, Any]


def prompt(length: int) -> list[int]:
    """Token ids, the same for a length."""
    rng = random.Random(length)
    return [rng.randrange(10, 2000) for _ in range(length)]


def prompts() -> list[list[int]]:
    """Token ids of PROMPTS."""
    return [prompt(length) for length in PROMPTS]


def ask(url: str, served_name: str) -> list[Answer]:
    """Greedy answers to PROMPTS, with logprobs. ValueError for what is no answer: vLLM has no JSON
    for a NaN, and a server may crash or hang at them."""
    choices = complete(
        url,
        model=served_name,
        prompt=prompts(),
        max_tokens=TOKENS,
        temperature=0,
        ignore_eos=True,
        logprobs=LIKELY,
        return_tokens_as_token_ids=True,
    )
    answers = []
    for choice in sorted(choices, key=lambda choice: choice["index"]):
        found = choice["logprobs"]
        said = zip(found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True)
        answers.append([{token: logprob, **top} for token, logprob, top in said])
    return answers


def complete(url: str, **body: Any) -> list[Row]:
    """The choices that a server gives for a completion. ValueError if it gives none."""
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as answer:
            choices: list[Row] = json.load(answer)["choices"]
    except urllib.error.HTTPError as error:
        raise ValueError(f"HTTP {error.code} {error.read().decode(errors='replace')}") from None
    except (OSError, http.client.HTTPException) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error
    return choices


def drift(one: list[Answer], other: list[Answer]) -> float:
    """By how many nats two servers differ at most about the best token of either; infinite where
    one holds the other's for unlikely, or a logprob is not finite."""
    found = [0.0]
    for a, b in zip(one, other, strict=True):
        for mine, theirs in zip(a, b, strict=True):
            for said, heard in ((mine, theirs), (theirs, mine)):
                token = next(iter(said))
                apart = abs(said[token] - heard.get(token, -math.inf))
                found.append(apart if math.isfinite(apart) else math.inf)
            if next(iter(mine)) != next(iter(theirs)):
                break  # from here on they answer other texts
    return max(found)


def tolerance(kv_cache_dtype: str, backends: list[str]) -> float:
    """Nats that two of these may differ by."""
    fp8 = "fp8" in kv_cache_dtype or any("fp8" in backend for backend in backends)
    return FP8_TOLERANCE if fp8 else TOLERANCE


def alone(agreed: list[str], asked: list[str]) -> bool:
    """Whether nobody vouches for those labels of `asked` that agree with the first.

    Where several of vLLM's backends were asked, labels of one alone (FP8_QUERY beside OURS) do not
    vouch for each other; where all are of one backend, another label is the best there is."""
    if len({engine_of(label)[0] for label in asked}) > 1:
        return len({engine_of(label)[0] for label in agreed}) < 2
    return len(agreed) < 2 <= len(asked)


def withhold(rows: list[Row]) -> list[Row]:
    """`rows` without speeds that no gate stands behind: those of the first server and of others of
    its vLLM backend, where other backends were asked and none agrees with it (`alone`). Who of them
    is wrong is not known."""
    gates = [row for row in rows if "nats_from_first" in row]
    agreed = [row["backend"] for row in gates if not row.get("red")]
    if not alone(agreed, [row["backend"] for row in gates]):
        return rows
    kept = ("backend", "shape", "loop", "concurrency", "rate")
    return [
        {key: row[key] for key in kept if key in row} | {"error": ALONE}
        if "output_tok_s" in row
        else row
        for row in rows
    ]
