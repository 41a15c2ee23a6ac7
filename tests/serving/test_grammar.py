# SPDX-License-Identifier: Apache-2.0
"""A grammar without a next token is the client's mistake; another failure of the engine is not."""

import pytest

JSON = {"content-type": "application/json"}
GIVEN_UP = "/v1/fail?how=given up"
GRAMMARS = [
    b'{"response_format": {"type": "json_schema"}}',
    b'{"structured_outputs":{"regex": "a"}}',
    b'{"text": {"format" : {"type": "json_schema"}}}',
    b'{"tools": [{}], "tool_choice": "required"}',
]


def ask(stand, path, body, **how):
    return stand(**how).request("POST", path, content=body, headers=JSON)


@pytest.mark.parametrize("body", GRAMMARS)
def test_a_grammar_that_is_given_up(stand, openai_error, body):
    error = openai_error(ask(stand, GIVEN_UP, body))
    assert (error["code"], error["type"]) == (400, "BadRequestError")
    assert "grammar that the request asks for" in error["message"]


@pytest.mark.parametrize(
    ("path", "body", "how"),
    [
        (GIVEN_UP, b'{"prompt": "tool_choice", "tools": [{}]}', {}),
        (GIVEN_UP, b'{"tools": [{}], "tool_choice": "auto"}', {}),
        (GIVEN_UP, GRAMMARS[0], {"kv_transfer": object()}),
        ("/v1/fail?how=raise", GRAMMARS[0], {}),
    ],
)
def test_other_failures_are_not_the_clients(stand, openai_error, path, body, how):
    assert openai_error(ask(stand, path, body, **how))["code"] == 500


def test_other_answers_arrive_unchanged(stand):
    assert ask(stand, "/v1/echo", GRAMMARS[0]).json()["bytes"] == len(GRAMMARS[0])
