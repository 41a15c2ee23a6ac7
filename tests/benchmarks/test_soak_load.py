# SPDX-License-Identifier: Apache-2.0
"""benchmarks/soak.py without a server: what it asks for, and what it takes for a fault."""

import asyncio
import json
import math
import random
from collections import Counter

import httpx
import pytest

CONTEXT = 1500
VOCABULARY = 200


def scope():
    from soak_cases import Scope

    return Scope(CONTEXT, 64, VOCABULARY)


def test_requests_are_of_every_kind_and_length():
    from soak_cases import KINDS, draw, probe_prompts

    rng = random.Random(0)
    probes = probe_prompts(scope())
    cases = [draw(rng, scope(), probes) for _ in range(3000)]
    assert {case.kind for case in cases} == set(KINDS)
    good = [case for case in cases if case.kind not in ("bad", "probe")]
    lengths = [len(case.body["prompt"]) for case in good]
    assert min(lengths) == 1 and max(lengths) > 0.9 * CONTEXT
    assert 0.1 < sum(length < 4 for length in lengths) / len(lengths) < 0.3
    for case in good:
        assert 1 <= case.body["max_tokens"] <= 64
        assert len(case.body["prompt"]) + case.body["max_tokens"] <= CONTEXT
        assert max(case.body["prompt"]) < VOCABULARY
        assert ("stream" in case.body) == (case.kind in ("stream", "leave"))
        assert math.isfinite(case.patience) == (case.kind in ("leave", "cut"))
    assert any("logprobs" in case.body for case in good)
    assert not all("logprobs" in case.body for case in good)
    assert all(
        len(case.body["prompt"]) == len(probes[case.probe]) for case in cases if case.probe >= 0
    )


GOOD = {
    "tokens": [5, 6],
    "logprobs": [-0.1, 0.0],
    "alternatives": [{"token_id:5": -0.1}, {"token_id:6": 0.0}],
    "finish": "length",
    "counted": 2,
}
ASKED = {"max_tokens": 2, "ignore_eos": True, "logprobs": 1}


def test_a_good_answer():
    from soak_load import Answer, complaint

    assert complaint(Answer(**GOOD), ASKED, VOCABULARY) is None
    ended = Answer(**GOOD | {"finish": "stop"})
    assert complaint(ended, ASKED | {"ignore_eos": False, "max_tokens": 9}, VOCABULARY) is None


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"tokens": []}, "empty"),
        ({"tokens": [5]}, "1 tokens where 2"),
        ({"tokens": [5, 6, 7]}, "3 tokens where 2"),
        ({"counted": 3}, "usage counts 3"),
        ({"finish": "stop"}, "finish_reason stop"),
        ({"finish": None}, "finish_reason None"),
        ({"tokens": [5, VOCABULARY]}, "outside the vocabulary"),
        ({"tokens": [5, -1]}, "outside the vocabulary"),
        ({"logprobs": [-0.1]}, "1 logprobs for 2"),
        ({"logprobs": [-0.1, None]}, "NaN"),
        ({"logprobs": [float("nan"), 0.0]}, "NaN"),
        ({"alternatives": [{"token_id:5": None}, {}]}, "NaN"),
        ({"logprobs": [-0.1, -9999.0]}, "cannot be"),
        ({"logprobs": [-0.1, 0.5]}, "cannot be"),
    ],
)
def test_a_wrong_answer(change, says):
    from soak_load import Answer, complaint

    assert says in complaint(Answer(**GOOD | change), ASKED, VOCABULARY)


def test_probes_are_compared_up_to_the_first_other_token():
    from soak_load import Answer, compare

    ties = [{"token_id:5": -0.1, "token_id:9": -0.3}, {"token_id:6": 0.0}]
    reference = Answer(**GOOD | {"alternatives": ties})
    assert compare(reference, reference) == ([0.0, 0.0], None)
    moved = Answer(**GOOD | {"logprobs": [-0.15, 0.0]})
    assert compare(reference, moved) == (pytest.approx([0.05, 0.0]), None)
    moves, gap = compare(reference, Answer(**GOOD | {"tokens": [9, 9], "logprobs": [-5.0, -5.0]}))
    assert (moves, gap) == ([], pytest.approx(0.2))
    assert compare(reference, Answer(**GOOD | {"tokens": [8, 6]})) == ([], math.inf)


class Server:
    """Answers as vLLM does, unless told to misbehave in one way."""

    def __init__(self, fault=None):
        self.fault = fault

    async def __call__(self, request):
        body = self.valid(request)
        if body is None and self.fault != "takes anything":
            return httpx.Response(400, json={"error": {"message": "no"}})
        body = body or {"max_tokens": 2}
        if self.fault == "hangs":
            await asyncio.sleep(60)
        if self.fault == "500":
            return httpx.Response(500, json={"error": {"message": "died"}})
        if self.fault == "gone":
            raise httpx.ConnectError("refused")
        if not body.get("stream"):
            return httpx.Response(200, json=self.event(body, range(body["max_tokens"]), True))
        events = [self.event(body, [i], False) for i in range(body["max_tokens"])]
        events[-1] = self.event(body, [body["max_tokens"] - 1], True)
        if self.fault == "error in the stream":
            events[0] = {"error": {"message": "died"}}
        if self.fault == "breaks off":
            events = events[:-1]
        lines = [f"data: {json.dumps(event, ensure_ascii=False)}\n\n" for event in events]
        lines += [] if self.fault == "breaks off" else ["data: [DONE]\n\n"]
        return httpx.Response(200, text="".join(lines))

    def valid(self, request):
        try:
            body = json.loads(request.content)
            prompt, count = body["prompt"], body["max_tokens"]
            fits = len(prompt) + count <= CONTEXT and 0 < count and max(prompt) < VOCABULARY
        except (ValueError, TypeError, KeyError):
            return None
        sampling = 0 <= body.get("temperature", 0) and body.get("top_p", 1) <= 1
        return body if fits and sampling and body["model"] == "soak" else None

    def event(self, body, places, last):
        token = 8 if self.fault == "other token" else 7
        value = None if self.fault == "NaN" else -0.5
        held = {f"token_id:{token}": value, "token_id:8": -9.0}
        logprobs = {
            "token_logprobs": [value for _ in places],
            "top_logprobs": [held for _ in places],
        }
        choice = {
            "text": "a\u2028b\x85c",  # ends no line of a stream
            "token_ids": [token for _ in places],
            "logprobs": logprobs if "logprobs" in body else None,
            "finish_reason": "length" if last else None,
        }
        usage = {"completion_tokens": body["max_tokens"]} if last else None
        return {"choices": [choice], "usage": usage}


def soak_against(fault, rounds=150):
    """The ledger after a few requests of each kind; the references are of a sound server."""
    from soak_cases import draw
    from soak_ledger import Ledger
    from soak_load import Client

    async def run():
        ledger, rng, server = Ledger(), random.Random(1), Server()
        transport = httpx.MockTransport(server)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            client = Client(http, ledger, scope(), tolerance=0.1)
            client.references = await client.probe_idle("begin")
            server.fault = fault
            for _ in range(rounds):
                await client.send(draw(rng, scope(), client.probes))
        return ledger

    return asyncio.run(run())


def test_a_sound_server_leaves_no_fault():
    from soak_ledger import OUTCOMES

    ledger = soak_against(None)
    assert ledger.faults == []
    assert set(ledger.outcomes) == set(OUTCOMES)
    assert ledger.requests == 150
    assert ledger.longest_prompt > 500
    assert (max(ledger.moves), ledger.other_tokens) == (0.0, 0)


@pytest.mark.parametrize(
    ("fault", "kinds", "says"),
    [
        ("500", {"whole", "stream", "cut", "leave", "probe"}, "status 500"),
        ("gone", {"whole", "stream", "cut", "leave", "probe"}, "ConnectError"),
        ("NaN", {"whole", "stream", "cut", "probe"}, "NaN in the logprobs"),
        ("breaks off", {"stream", "leave"}, "broke off"),
        ("error in the stream", {"stream", "leave"}, "error instead of an answer"),
        ("takes anything", {"bad"}, "answered with 200"),
        ("other token", {"probe"}, "another token that was 8.5 below"),
    ],
)
def test_a_faulty_server_is_found(fault, kinds, says):
    ledger = soak_against(fault)
    found = Counter(text.partition(":")[0] for text in ledger.faults)
    assert found and set(found) <= kinds
    assert any(says in text for text in ledger.faults)
    assert ledger.requests == 150  # each has an outcome or a fault


def test_a_request_without_end_is_a_fault(monkeypatch):
    import soak_load

    monkeypatch.setattr(soak_load, "REQUEST_SECONDS", 0.01)
    ledger = soak_against("hangs", rounds=12)
    assert any("no end after" in text for text in ledger.faults)
