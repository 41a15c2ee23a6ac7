# SPDX-License-Identifier: Apache-2.0
"""--enable-request-id-headers: refusals have the name of their request too."""

import re

import pytest

NAME = "X-Request-Id"
KEY = {"Authorization": "Bearer secret"}


def ask(stand, headers, path="/v1/echo", **kwargs):
    kwargs = {"content": b"x"} | kwargs
    return stand.request("POST", path, headers=headers, **kwargs)


@pytest.fixture
def named(stand):
    return stand(keys=["secret"], body_mib=0.001, request_ids=True)


@pytest.mark.parametrize(
    "status, headers, asked",
    [
        (200, KEY, {}),
        (401, {}, {}),
        (404, KEY, {"path": "/nowhere"}),
        (405, KEY, {"path": "/health"}),
        (413, KEY, {"content": b"x" * 2000}),
        (500, KEY, {"path": "/v1/fail?how=crash"}),
    ],
)
def test_every_answer_has_the_name_of_its_request(named, status, headers, asked):
    answer = ask(named, headers | {NAME: "mine"}, **asked)
    assert (answer.status_code, answer.headers.get_list(NAME)) == (status, ["mine"])
    made_up = {ask(named, headers, **asked).headers[NAME] for _ in range(2)}
    assert len(made_up) == 2 and all(re.fullmatch("[0-9a-f]{32}", name) for name in made_up)


def test_vllm_says_it_once_and_reads_what_the_client_sent(named):
    """It prefers the header to a request_id of the body, so that none is to be made up for it."""
    module = "vllm.entrypoints.serve.middleware.x_request_id"  # since 0.29
    middleware = pytest.importorskip(module).XRequestIdMiddleware
    seen = []

    async def see(request, call_next):
        seen.append(request.headers.get(NAME))
        return await call_next(request)

    named.vllm_app.middleware("http")(see)
    named.vllm_app.add_middleware(middleware)
    assert ask(named, KEY | {NAME: "mine"}).headers.get_list(NAME) == ["mine"]
    assert len(ask(named, KEY).headers.get_list(NAME)) == 1
    assert seen == ["mine", None]


def test_none_unless_it_is_asked_for(stand):
    assert NAME not in stand(keys=["secret"]).request("GET", "/mla/info").headers
