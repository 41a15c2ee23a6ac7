# SPDX-License-Identifier: Apache-2.0
"""The root application: whose route answers, the shape of errors, the API key, the body limit."""

import asyncio
import json

import pytest
from mla_serving.server.auth import ApiKey
from prometheus_client import REGISTRY
from starlette.responses import Response

# Of vLLM's 400 for chat, and for embeddings and scores of a model that is served for these.
NAN = (
    "What the model computed (logprobs, embeddings, scores) is NaN, or infinite: a fault of its "
    "weights or of the server."
)
HERE = "tests.serving.test_app."
KEY = {"Authorization": "Bearer secret"}


class Guard:
    """A user's middleware."""

    def __init__(self, app):
        self.app = app

    async def __call__(self, scope, receive, send):
        guarded = scope["type"] == "http" and (b"x-user", b"me") not in scope["headers"]
        app = Response("who are you?", 401) if guarded else self.app
        await app(scope, receive, send)


async def guard(request, call_next):
    assert request.app.state.release  # vLLM's state
    if request.headers.get("x-user") != "me":
        return Response("who are you?", 401)
    return await call_next(request)


async def mark(request, call_next):
    answer = await call_next(request)
    answer.headers["x-marks"] = answer.headers.get("x-marks", "") + "x"
    return answer


@pytest.mark.parametrize("name", ["Guard", "guard"])
def test_the_middleware_of_users_is_around_our_routes_too(stand, openai_error, name):
    s = stand(middleware=[HERE + name, HERE + "mark"])
    asked = (("GET", "/mla/info"), ("GET", "/health"), ("GET", "/metrics"), ("POST", "/v1/echo"))
    for method, path in asked:
        refused = s.request(method, path)
        assert openai_error(refused) == openai_error(refused) | {
            "code": 401,
            "message": "who are you?",
        }
        answer = s.request(method, path, headers={"x-user": "me"})
        assert (answer.status_code, answer.headers["x-marks"]) == (200, "x")
    assert s.events == [0]


def test_middleware_that_is_none(stand):
    with pytest.raises(ValueError, match=r"--middleware tests.serving.test_app.KEY: expected"):
        stand(middleware=[HERE + "KEY"])


def test_our_routes_win_and_the_rest_is_vllms(stand):
    s = stand()
    health = s.request("GET", "/health")
    assert (health.status_code, health.content) == (200, b"")
    assert s.request("GET", "/metrics").json() == {"from": "vllm"}
    assert s.request("POST", "/v1/echo", content=b"abc").json() == {"bytes": 3, "sum": 294}


@pytest.mark.parametrize("path", ["/health", "/mla/info"])
def test_head_is_get_without_a_body(stand, path):
    """Load balancers ask so."""
    s = stand()
    get, head = s.request("GET", path), s.request("HEAD", path)
    assert (head.status_code, head.headers) == (200, get.headers)
    s.engine.errored = True
    assert s.request("HEAD", path).status_code == (503 if path == "/health" else 200)


def test_health_follows_the_engine_and_the_drain(stand, openai_error):
    s = stand()
    s.engine.errored = True
    assert openai_error(s.request("GET", "/health"))["code"] == 503
    s.engine.errored = False
    s.gate.draining = True
    assert openai_error(s.request("GET", "/health"))["code"] == 503


def test_a_rank_that_was_scaled_away_is_well(stand):
    """Its engine has ended as it should, and whoever scales removes the server."""
    s = stand()
    s.engine.errored = s.engine.should_keep_api_server_alive = True
    s.watchdog._failure = "EngineDeadError"
    assert s.request("GET", "/health").status_code == 200


def test_vllms_lifespan_runs(stand):
    s = stand()

    async def run():
        async with s.app.router.lifespan_context(s.app):
            assert s.events == ["started"]

    asyncio.run(run())
    assert s.events == ["started", "ended"]


@pytest.mark.parametrize(
    ("how", "status", "message"),
    [
        ("detail", 422, '[{"loc": ["body"], "msg": "bad"}]'),
        ("string", 401, "Unauthorized"),
        ("shaped", 404, "m"),
        ("silent", 500, "Internal Server Error"),
        ("nan", 500, NAN),
        ("raw", 502, "plain"),
    ],
)
def test_every_error_has_openais_shape(stand, how, status, message):
    answer = stand().request("POST", f"/v1/fail?how={how}")
    assert answer.status_code == status
    assert answer.json()["error"]["message"] == message
    assert answer.json()["error"]["code"] == status
    assert int(answer.headers["content-length"]) == len(answer.content)


def test_a_crash_is_a_500_that_tells_nothing(stand, openai_error):
    answer = stand().request("POST", "/v1/fail?how=crash")
    assert openai_error(answer)["code"] == 500
    assert "private text" not in answer.text


def test_an_error_that_streams_is_left_alone(stand):
    answer = stand().request("POST", "/v1/fail?how=stream")
    assert (answer.status_code, answer.text) == (500, "data: x\n\n")


def test_an_error_that_is_packed_or_long_is_left_alone(stand):
    """What is not read is not rewritten, and what has no end is not held back."""
    packed = stand().request("POST", "/v1/fail?how=packed")
    assert (packed.status_code, packed.content) == (500, b"\x1f\x8b")
    sent = []

    async def send(message):
        sent.append(len(message.get("body", b"")))

    async def receive():
        await asyncio.Event().wait()  # the client stays

    scope = {"type": "http", "method": "POST", "path": "/v1/fail", "headers": []}
    asyncio.run(stand().app(scope | {"query_string": b"how=endless"}, receive, send))
    assert sum(sent) == 120_000 and max(sent) == 80_000


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nowhere", 404),
        ("GET", "/v1/echo", 405),
        ("POST", "/health", 405),
        ("POST", "/v1/fail", 422),
    ],
)
def test_wrong_route_method_and_argument(stand, openai_error, method, path, status):
    assert openai_error(stand().request(method, path))["code"] == status


@pytest.mark.parametrize("path", ["/health", "/mla/info"])
@pytest.mark.parametrize("method", ["PUT", "POST", "DELETE", "PATCH", "OPTIONS", "TRACE"])
def test_our_routes_only_read(stand, openai_error, method, path):
    answer = stand().request(method, path)
    assert openai_error(answer)["code"] == 405
    assert answer.headers["allow"] == "GET, HEAD"
    assert f"{method} is not allowed at {path}" in answer.text


@pytest.mark.parametrize(
    "path",
    [
        "/metrics",
        "/mla/info",
        "/docs",
        "/openapi.json",
        "/nowhere",
        "/",
        "//health",
        "/health/",
        "/v1/../health/x",
    ],
)
def test_the_key_covers_every_route(stand, openai_error, path):
    s = stand(keys=["other", "secret"])
    refused = s.request("GET", path)
    assert openai_error(refused)["code"] == 401
    assert refused.headers["www-authenticate"] == "Bearer"
    assert s.request("GET", path, headers=KEY).status_code != 401


def test_the_key_does_not_cover_health(stand):
    assert stand(keys=["secret"]).request("GET", "/health").status_code == 200


def test_metrics_may_be_open(stand):
    """To what collects them and should not hold a key that computes."""
    s = stand(keys=["secret"], open_metrics=True)
    assert s.request("GET", "/metrics").status_code == 200
    assert s.request("GET", "/mla/info").status_code == 401


def test_what_is_refused_before_vllm_is_counted(stand):
    def counts():
        names = [{"status": status} for status in ("200", "401", "429")]
        values = [REGISTRY.get_sample_value("mla_http_answers_total", name) for name in names]
        return [value or 0 for value in values]

    s = stand(keys=["secret"], limit=1)
    before = counts()
    s.request("POST", "/v1/echo", content=b"x")
    s.request("POST", "/v1/echo", content=b"x", headers=KEY)
    s.gate.enter()
    s.request("POST", "/v1/echo", content=b"x", headers=KEY)
    assert counts() == [count + 1 for count in before]


@pytest.mark.parametrize(
    "header", ["", "Bearer", "Bearer ", "Bearer secre", "Bearer secret2", "Basic secret", "secret"]
)
def test_wrong_keys(stand, header):
    answer = stand(keys=["secret"]).request("GET", "/mla/info", headers={"Authorization": header})
    assert answer.status_code == 401


PREFLIGHT = {"Origin": "http://x", "Access-Control-Request-Method": "POST"}


def test_a_cors_preflight_needs_no_key_but_any_other_options_does(stand):
    s = stand(keys=["secret"])
    asked_ahead = s.request("OPTIONS", "/v1/echo", headers=PREFLIGHT)
    assert (
        asked_ahead.status_code == 200
        and "POST" in asked_ahead.headers["access-control-allow-methods"]
    )
    assert s.request("OPTIONS", "/v1/echo").status_code == 401
    for method in ("GET", "POST"):
        assert s.request(method, "/v1/echo", headers=PREFLIGHT).status_code == 401


def test_a_page_reads_refusals_too(stand):
    answers = [
        stand(keys=["secret"]).request("POST", "/v1/echo", headers={"Origin": "http://x"}),
        stand(body_mib=1e-6).request(
            "POST", "/v1/echo", headers={"Origin": "http://x"}, content="xx"
        ),
        stand().request("POST", "/v1/echo", headers={"Origin": "http://x"}),
    ]
    assert [answer.status_code for answer in answers] == [401, 413, 200]
    for answer in answers:
        assert answer.headers["access-control-allow-origin"] == "http://x"


@pytest.mark.parametrize("words", ["bearer secret", "Bearer  secret"])
def test_the_scheme_is_of_any_case_and_any_space_is_behind_it(stand, words):
    headers = {"Authorization": words}
    assert stand(keys=["secret"]).request("GET", "/mla/info", headers=headers).status_code == 200


@pytest.mark.parametrize("words", ["bearer secret", "Bearer  secret", "BEARER   secret "])
def test_vllms_check_behind_ours_reads_the_same_key(words):
    """vLLM's takes all behind the first space for the key."""
    seen = []

    async def app(scope, receive, send):
        seen.append(scope["headers"])

    scope = {"type": "http", "path": "/v1/models"}
    scope["headers"] = [(b"host", b"x"), (b"authorization", words.encode())]
    asyncio.run(ApiKey(app, ["secret"], [])(scope, None, None))
    assert seen == [[(b"host", b"x"), (b"authorization", b"Bearer secret")]]


@pytest.mark.parametrize("path", ["/metrics", "/metrics/", "/metricsx"])
def test_a_websocket_to_metrics_is_closed(stand, path):
    """The application that vLLM mounts there fails at one."""
    s, sent = stand(), []

    async def fail(scope, receive, send):
        raise AssertionError

    s.vllm_app.router.routes.clear()
    s.vllm_app.mount("", fail)

    async def send(message):
        sent.append((message["type"], message.get("code")))

    scope = {"type": "websocket", "path": path, "headers": [], "query_string": b""}
    asyncio.run(s.app(scope, None, send))
    assert sent == [("websocket.close", 1008)]


@pytest.mark.parametrize("path", ["/v1/realtime", "/metrics"])
def test_a_websocket_without_key_is_closed(stand, path):
    s, sent = stand(keys=["secret"], open_metrics=True), []

    async def send(message):
        sent.append(message)

    scope = {"type": "websocket", "path": path, "headers": []}
    asyncio.run(s.app(scope, None, send))
    assert sent == [{"type": "websocket.close", "code": 1008}]


def test_routes_below_a_root_path(stand):
    s = stand(keys=["secret"], root_path="/api")
    assert s.request("GET", "/api/health").status_code == 200
    assert s.request("GET", "/health").status_code == 200
    assert s.request("GET", "/api/mla/info").status_code == 401
    assert s.request("GET", "/api/health/").status_code == 401


async def _in_pieces(body, size):
    for start in range(0, len(body), size):
        yield body[start : start + size]


@pytest.mark.parametrize("chunked", [False, True])
def test_body_limit(stand, openai_error, chunked):
    s = stand(body_mib=0.001)  # 1048 bytes
    for size, status in ((1048, 200), (1049, 413), (500_000, 413)):
        body = bytes(i % 251 for i in range(size))
        content = _in_pieces(body, 100) if chunked else body
        answer = s.request("POST", "/v1/echo", content=content)
        assert answer.status_code == status
        if status == 413:
            assert "1048 bytes" in openai_error(answer)["message"]
        else:
            assert answer.json() == {"bytes": size, "sum": sum(body)}
    assert s.events == [1048]  # nothing above the limit reached the application


@pytest.mark.parametrize("more", [True, False])
def test_a_body_whose_last_piece_is_too_much_is_answered(stand, more):
    """uvicorn says with the last piece, or behind it, that there are no more."""
    s, sent = stand(body_mib=0.001), []
    pieces = [{"type": "http.request", "body": b"x" * 1049, "more_body": more}]
    pieces += [{"type": "http.request", "body": b"", "more_body": False}] * more

    async def receive():
        return pieces.pop(0)  # once more: IndexError, where a real client is waited for

    async def send(message):
        sent.append(message)

    headers = [(b"transfer-encoding", b"chunked")]
    scope = {"type": "http", "method": "POST", "path": "/v1/echo", "headers": headers}
    asyncio.run(s.app(scope, receive, send))
    assert sent[0]["status"] == 413


def test_a_client_that_asks_first_is_not_told_to_send_what_is_refused(stand):
    s, sent = stand(body_mib=0.001), []

    async def receive():
        raise AssertionError("uvicorn answers the first receive() with 100 Continue")

    async def send(message):
        sent.append(message)

    headers = [(b"content-length", b"1049"), (b"expect", b"100-Continue")]
    scope = {"type": "http", "method": "POST", "path": "/v1/echo", "headers": headers}
    asyncio.run(s.app(scope, receive, send))
    assert sent[0]["status"] == 413


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("drip", [None, 0.02])
def test_who_stalls_in_a_body_that_is_too_large_is_told_so(stand, monkeypatch, chunked, drip):
    from mla_serving.server import body_limit, body_wait

    monkeypatch.setattr(body_limit, "_DISCARD_SECONDS", 0.2)
    monkeypatch.setattr(body_wait.BodyWait.__init__, "__defaults__", (1.0,))
    s, sent, first = stand(body_mib=0.001), [], [b"x" * 1049]

    async def receive():
        if not first:  # one byte at a time, or none any more
            await (asyncio.sleep(drip) if drip else asyncio.Event().wait())
        return {"type": "http.request", "body": first.pop() if first else b"x", "more_body": True}

    async def send(message):
        sent.append(message)

    headers = [(b"transfer-encoding", b"chunked") if chunked else (b"content-length", b"9999")]
    scope = {"type": "http", "method": "POST", "path": "/v1/echo", "headers": headers}
    asyncio.run(asyncio.wait_for(s.app(scope, receive, send), 30))
    assert sent[0]["status"] == 413 and s.gate.running == 0


@pytest.mark.parametrize("chunked", [False, True])
def test_of_a_body_that_is_too_large_so_much_is_read(stand, monkeypatch, chunked):
    """Who sends without end, and fast, is answered before the seconds of who stalls."""
    from mla_serving.server import body_limit

    monkeypatch.setattr(body_limit, "_DISCARD_BYTES", 5 * 1049)
    monkeypatch.setattr(body_limit, "_DISCARD_SECONDS", 60.0)
    s, sent, pieces = stand(body_mib=0.001), [], []

    async def receive():
        pieces.append(b"x" * 1049)
        assert len(pieces) <= 6
        return {"type": "http.request", "body": pieces[-1], "more_body": True}

    async def send(message):
        sent.append(message)

    headers = [(b"transfer-encoding", b"chunked") if chunked else (b"content-length", b"99999999")]
    scope = {"type": "http", "method": "POST", "path": "/v1/echo", "headers": headers}
    asyncio.run(s.app(scope, receive, send))
    assert sent[0]["status"] == 413 and len(pieces) == 5 + chunked


def test_a_chunked_body_is_read_on_even_if_its_client_asked_first(stand):
    """It was told to go on when its first pieces were read: closing would reset the connection."""
    s, sent, pieces = stand(body_mib=0.001), [], [b"x" * 1049] * 5

    async def receive():
        piece = pieces.pop()
        return {"type": "http.request", "body": piece, "more_body": bool(pieces)}

    async def send(message):
        sent.append(message)

    headers = [(b"transfer-encoding", b"chunked"), (b"expect", b"100-continue")]
    scope = {"type": "http", "method": "POST", "path": "/v1/echo", "headers": headers}
    asyncio.run(s.app(scope, receive, send))
    assert sent[0]["status"] == 413 and pieces == []


@pytest.mark.parametrize("chunked", [True, False])
@pytest.mark.parametrize("pieces", [0, 1])
def test_a_body_that_stops_does_not_hold_a_place(stand, monkeypatch, pieces, chunked):
    from mla_serving.server import body_wait

    monkeypatch.setattr(body_wait.BodyWait.__init__, "__defaults__", (0.05,))
    s, sent = stand(), []
    body = [{"type": "http.request", "body": b'{"a":', "more_body": True}] * pieces

    async def receive():
        if body:
            return body.pop()
        return await asyncio.Event().wait()  # the client keeps the connection, and sends nothing

    async def send(message):
        sent.append(message)

    headers = [(b"content-type", b"application/json")]
    headers.append((b"transfer-encoding", b"chunked") if chunked else (b"content-length", b"9"))
    scope = {"type": "http", "method": "POST", "path": "/v1/echo", "headers": headers}
    asyncio.run(s.app(scope, receive, send))
    assert sent[0]["status"] == 408
    assert (b"connection", b"close") in sent[0]["headers"]
    assert json.loads(sent[1]["body"])["error"]["message"].endswith("stopped for 0.05 seconds.")
    assert s.gate.running == 0 and s.events == []


def test_an_answer_may_stream_for_longer_than_a_body_is_waited_for():
    """Starlette listens meanwhile whether the client has gone, of a body that nobody read too."""
    from mla_serving.server.body_wait import BodyWait
    from starlette.responses import StreamingResponse

    async def parts():
        for _ in range(5):
            await asyncio.sleep(0.05)
            yield b"x"

    async def receive():
        await asyncio.Event().wait()

    sent = []

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/", "headers": []}
    asyncio.run(BodyWait(StreamingResponse(parts()), 0.1)(scope, receive, send))
    assert sent[0]["status"] == 200
    assert b"".join(message.get("body", b"") for message in sent) == b"xxxxx"


def test_info(stand):
    s = stand()
    s.gauges = {
        "vllm:kv_cache_usage_perc": [0.25],
        "vllm:num_requests_running": [2.0],
        "vllm:num_requests_waiting": [1.0],
    }
    info = s.request("GET", "/mla/info").json()
    assert info["attention"]["backend"] == "CUSTOM"
    assert info["attention"]["workers"] == [{"rank": 0, "method": "mla_backend_stats"}]
    assert info["cache"]["blocks_total"] == 101
    assert info["cache"]["blocks_used"] == 25  # of 100: one block is padding
    assert info["cache"]["layout"] == "[blocks, 64, 576] bfloat16: 512 latent, 64 rope"
    assert info["requests"] == {"running": 2, "waiting": 1}
    assert info["server"] == {"draining": False, "http_requests": 0, "refused": 0}


def test_info_without_statistics_or_workers(stand, monkeypatch):
    s = stand()
    monkeypatch.setattr("mla_serving.server.info._WORKER_TIMEOUT_SECONDS", 0.01)
    s.engine.rpc_delay = 10
    info = s.request("GET", "/mla/info").json()
    assert info["attention"]["workers"] is None
    assert info["cache"]["blocks_used"] is None
    assert info["requests"] == {"running": None, "waiting": None}


def test_info_asks_a_hung_engine_one_question_at_a_time(stand, monkeypatch):
    s = stand()
    monkeypatch.setattr("mla_serving.server.info._WORKER_TIMEOUT_SECONDS", 0.01)
    release, asked = asyncio.Event(), []

    async def ask(method):
        asked.append(method)
        await release.wait()
        return [{"rank": 0}]

    monkeypatch.setattr(s.info, "_ask", ask)

    async def run():
        async with s.client() as client:

            async def workers():
                return (await client.get("/mla/info")).json()["attention"]["workers"]

            assert [await workers() for _ in range(3)] == [None] * 3
            assert len(asked) == 1
            release.set()
            await asyncio.sleep(0)
            assert await workers() == [{"rank": 0}]
            assert len(asked) == 2  # with an answer, anew

    asyncio.run(run())


def test_info_of_a_dead_engine_is_what_its_workers_said_last(stand):
    s = stand()
    said = s.request("GET", "/mla/info").json()["attention"]["workers"]
    s.engine.errored, s.engine.rpc_delay = True, 10

    async def run():
        async with s.client() as client:
            return await asyncio.wait_for(client.get("/mla/info"), 1)

    assert asyncio.run(run()).json()["attention"]["workers"] == said is not None


def test_info_sums_over_engines(stand):
    s = stand()
    s.engine.vllm_config.cache_config.num_gpu_blocks = 202
    s.gauges = {"vllm:kv_cache_usage_perc": [0.25, 0.5]}
    assert s.request("GET", "/mla/info").json()["cache"]["blocks_used"] == 75


def test_info_on_the_cache_row_of_fp8_ds_mla(stand):
    s = stand()
    s.engine.vllm_config.cache_config.cache_dtype = "fp8_ds_mla"
    assert "[blocks, 64, 656] uint8" in s.request("GET", "/mla/info").json()["cache"]["layout"]


def test_the_order_of_refusals(stand, openai_error):
    """The key is asked for before a place is taken or a body read."""
    s = stand(keys=["secret"], limit=1, body_mib=0.001)
    s.gate.enter()
    assert openai_error(s.request("POST", "/v1/echo", content=b"x" * 5000))["code"] == 401
    assert s.gate.refused == 0
    answer = s.request("POST", "/v1/echo", content=b"x" * 5000, headers=KEY)
    assert openai_error(answer)["code"] == 429
    s.gate.leave()
    answer = s.request("POST", "/v1/echo", content=b"x" * 5000, headers=KEY)
    assert openai_error(answer)["code"] == 413


def test_a_websocket_is_told_to_come_back_during_a_drain(stand):
    s, sent = stand(), []
    s.gate.draining = True

    async def send(message):
        sent.append(message)

    asyncio.run(s.app({"type": "websocket", "path": "/v1/realtime", "headers": []}, None, send))
    assert sent == [{"type": "websocket.close", "code": 1013}]
