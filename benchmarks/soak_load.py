# SPDX-License-Identifier: Apache-2.0
"""The client of a soak: sends requests over HTTP and checks the answers."""

import asyncio
import json
import math
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import httpx
from soak_cases import Body, Case, Scope, draw, probe_body, probe_prompts
from soak_ledger import Ledger, moved_too_far

PATH = "/v1/completions"
REQUEST_SECONDS = 300.0  # a request that takes longer hangs
MOST_FAULTS = 100  # the soak is over


@dataclass
class Answer:
    """Token by token; None stands for what JSON cannot hold, which is NaN."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)
    alternatives: list[dict[str, float | None]] = field(default_factory=list)
    finish: str | None = None
    counted: int | None = None  # completion tokens, as the server says

    def add(self, event: Body) -> None:
        """Take in a whole answer, or one event of a stream."""
        if "error" in event:
            raise ValueError(f"an error instead of an answer: {event['error']}")
        for choice in event["choices"]:
            self.tokens += choice["token_ids"] or []
            if choice.get("logprobs"):
                self.logprobs += choice["logprobs"]["token_logprobs"]
                self.alternatives += choice["logprobs"]["top_logprobs"]
            self.finish = choice["finish_reason"] or self.finish
        if event.get("usage"):
            self.counted = event["usage"]["completion_tokens"]


def complaint(answer: Answer, body: Body, vocabulary: int) -> str | None:
    """What is wrong with an answer that came to its end, if anything is."""
    count, asked = len(answer.tokens), body["max_tokens"]
    if count == 0:
        return "an empty answer"
    if count > asked or (body["ignore_eos"] and count < asked):
        return f"{count} tokens where {asked} were asked for"
    if answer.counted != count:
        return f"{count} tokens, but usage counts {answer.counted}"
    if answer.finish not in ("length",) + (() if body["ignore_eos"] else ("stop",)):
        return f"finish_reason {answer.finish}"
    if any(not 0 <= token < vocabulary for token in answer.tokens):
        return f"a token outside the vocabulary: {max(answer.tokens)}, {min(answer.tokens)}"
    if "logprobs" not in body:
        return None
    if len(answer.logprobs) != count:
        return f"{len(answer.logprobs)} logprobs for {count} tokens"
    others = [p for position in answer.alternatives for p in position.values()]
    if not all(isinstance(p, float | int) and math.isfinite(p) for p in answer.logprobs + others):
        return "NaN in the logprobs"
    # vLLM writes -9999 for minus infinity: such a token cannot have been sampled.
    if not all(-9000 < p < 0.01 for p in answer.logprobs if p is not None):
        return f"a logprob that cannot be: {min(answer.logprobs)} to {max(answer.logprobs)}"
    return None


def compare(reference: Answer, answer: Answer) -> tuple[list[float], float | None]:
    """How far a probe's answer is from the one on the idle server, in nats.

    Returns the changes of the logprobs of the tokens before the first other one, and how much less
    likely than the reference's the reference held that one (None: all tokens are the same; inf: it
    was not among its alternatives).
    """
    moves: list[float] = []
    for i, (expected, token) in enumerate(zip(reference.tokens, answer.tokens, strict=True)):
        if token != expected:
            held = reference.alternatives[i]
            other = held.get(f"token_id:{token}", -math.inf)
            return moves, held[f"token_id:{expected}"] - other
        moves.append(abs(reference.logprobs[i] - answer.logprobs[i]))
    return moves, None


async def events(response: httpx.Response) -> AsyncIterator[bytes]:
    """The data of server-sent events. httpx's own lines also end at U+2028 and its like, which
    JSON need not escape."""
    rest = b""
    async for piece in response.aiter_bytes():
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.strip():
                yield line.strip().removeprefix(b"data: ")


class Client:
    """Sends cases and writes into the ledger what came of them.

    tolerance  in nats: by which a probe's logprobs may move under load (`moved_too_far`)
    """

    def __init__(
        self, http: httpx.AsyncClient, ledger: Ledger, scope: Scope, tolerance: float
    ) -> None:
        self.http = http
        self.ledger = ledger
        self.scope = scope
        self.tolerance = tolerance
        self.probes = probe_prompts(scope)
        self.references: list[Answer] = []

    async def probe_idle(self, salt: str) -> list[Answer]:
        """The answers to all probes, one after the other; call it while nothing else runs."""
        answers = []
        for i, prompt in enumerate(self.probes):
            case = Case("probe", {"json": probe_body(prompt, f"{salt}-{i}")})
            answers.append(await self._whole(case))
        return answers

    async def work(self, rng: random.Random, ended: asyncio.Event, pause: float) -> None:
        """One request after the other until `ended`, up to `pause` s between.

        Ends early when nearly all is going wrong.
        """
        while not ended.is_set() and self.ledger.fault_count < MOST_FAULTS:
            await self.send(draw(rng, self.scope, self.probes))
            await asyncio.sleep(rng.uniform(0, pause))

    async def send(self, case: Case) -> None:
        """Whatever happens is in the ledger afterwards; raises nothing of the server's."""
        try:
            async with asyncio.timeout(REQUEST_SECONDS):
                outcome = await self._send(case)
            self.ledger.outcomes[outcome] += 1
        except TimeoutError:
            self.ledger.request_failed(f"{case.kind}: no end after {REQUEST_SECONDS:.0f} s")
        except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
            self.ledger.request_failed(f"{case.kind}: {type(error).__name__}: {error}")

    async def _send(self, case: Case) -> str:
        if case.kind == "bad":
            return await self._refused(case)
        self.ledger.saw_prompt(len(case.body["prompt"]))
        if case.kind == "cut":
            try:
                async with asyncio.timeout(case.patience):
                    await self._whole(case)
            except TimeoutError:
                return "left"
        elif "stream" in case.body:
            if not await self._stream(case):
                return "left"
        else:
            answer = await self._whole(case)
            if case.kind == "probe":
                self._judge_probe(case.probe, answer)
                return "probes"
        return "done"

    async def _refused(self, case: Case) -> str:
        answer = await self.http.post(PATH, **case.request)
        if not 400 <= answer.status_code < 500:
            asked = str(case.request)[:200]
            raise ValueError(f"answered with {answer.status_code}: {asked}")
        if not answer.json()["error"]["message"]:
            raise ValueError("refused without a word")
        return "refused"

    async def _whole(self, case: Case) -> Answer:
        response = await self.http.post(PATH, **case.request)
        if response.status_code != 200:
            raise ValueError(f"status {response.status_code}: {response.text[:200]}")
        answer = Answer()
        answer.add(response.json())
        return self._checked(answer, case)

    async def _stream(self, case: Case) -> bool:
        """True at the end of the stream, False when the client left it."""
        answer, chunks, ended = Answer(), 0, False
        async with self.http.stream("POST", PATH, **case.request) as response:
            if response.status_code != 200:
                text = (await response.aread()).decode()
                raise ValueError(f"status {response.status_code}: {text[:200]}")
            async for data in events(response):
                if chunks >= case.patience:
                    return False
                if data == b"[DONE]":
                    ended = True
                    continue
                answer.add(json.loads(data))
                chunks += 1
        if not ended:
            raise ValueError(f"the stream broke off after {chunks} events")
        self._checked(answer, case)
        return True

    def _checked(self, answer: Answer, case: Case) -> Answer:
        wrong = complaint(answer, case.body, self.scope.vocabulary)
        if wrong:
            raise ValueError(f"{wrong} (prompt of {len(case.body['prompt'])})")
        self.ledger.answer_tokens += len(answer.tokens)
        return answer

    def _judge_probe(self, number: int, answer: Answer) -> None:
        moves, gap = compare(self.references[number], answer)
        length = len(self.probes[number])
        self.ledger.saw_probe(length, moves, gap)
        wrong = moved_too_far(moves, gap, self.tolerance)
        if wrong:
            raise ValueError(f"{wrong} (prompt of {length})")
