# SPDX-License-Identifier: Apache-2.0
"""A grammar without a next token is the client's mistake; another failure of the engine is not."""

import asyncio
import json
from types import SimpleNamespace

import pytest
from mla_serving.server import grammar

STREAMS = ["chat", "messages", "responses"]


def ask(stand, path, **how):
    return stand(**how).request("POST", f"/v1/{path}", json={})


def events(answer):
    """What a stream says, the lines of its events' names aside."""
    lines = [line for line in answer.text.splitlines() if line.startswith("data: ")]
    return [line.removeprefix("data: ") for line in lines]


def test_a_grammar_that_is_given_up(stand, openai_error):
    error = openai_error(ask(stand, "generate?how=unstreamed"))
    assert (error["code"], error["type"]) == (400, "BadRequestError")
    assert "grammar that the request asks for" in error["message"]
    assert "NaN, which is no fault of the request" in error["message"]


@pytest.mark.parametrize("how", STREAMS)
def test_a_grammar_that_is_given_up_in_a_stream(stand, how):
    answer = ask(stand, f"generate?how={how}")
    first, second, *rest = events(answer)
    assert (answer.status_code, first) == (200, "None")
    error = json.loads(second)["error"]
    assert (error["code"], error["type"]) == (400, "BadRequestError")
    assert "grammar that the request asks for" in error["message"]
    named = how != "chat"
    assert answer.text.count("event: error\n") == named
    assert json.loads(second).get("type", "") == ("error" if named else "")
    assert rest == ([] if how == "responses" else ["[DONE]"])


@pytest.mark.parametrize(
    ("path", "how"),
    [
        ("generate?how=unstreamed&grammar=0", {}),
        ("generate?how=unstreamed", {"kv_transfer": object()}),  # whatever option made it
        ("generate?how=unstreamed&kind=multimodal", {}),
        ("fail?how=raise", {}),
    ],
)
def test_other_failures_are_not_the_clients(stand, openai_error, path, how):
    assert openai_error(ask(stand, path, **how))["code"] == 500


@pytest.mark.parametrize("of", ["grammar=0", "kind=multimodal"])
@pytest.mark.parametrize("how", STREAMS)
def test_other_failures_of_a_stream_arrive_unchanged(stand, how, of):
    answer = ask(stand, f"generate?how={how}&{of}")
    assert events(answer)[0] == "None"
    assert "grammar" not in answer.text


def test_other_answers_arrive_unchanged(stand):
    assert ask(stand, "generate?how=unstreamed&ends=stop").json()["reasons"] == [None, "stop"]
    assert events(ask(stand, "generate?how=chat&ends=stop")) == ["None", "stop", "[DONE]"]
    assert ask(stand, "echo").json()["bytes"] == 2


def test_leaving_a_request_with_a_grammar_ends_it_at_once(stand):
    """The engine's generator is closed with the one around it: that aborts the request."""
    made = stand()

    async def leave():
        grammar._answer.set(grammar._Answer())
        params = SimpleNamespace(structured_outputs="of it")
        outputs = made.engine.generate({"ends": "stop"}, params, "id")
        await anext(outputs)
        await outputs.aclose()
        return made.engine.closed

    assert asyncio.run(leave())
