# SPDX-License-Identifier: Apache-2.0
"""Requests over a real socket: how many are taken, and that none is counted when it has ended."""

import asyncio
import json
from functools import partial

import httpx
import pytest
from mla_serving.server.head_limit import HeadLimit

from tests.serving.connection import connected
from tests.serving.running_app import DONE, WAIT_SECONDS, Running


@pytest.mark.parametrize("shared", [False, True])
def test_admission_limit(stand, openai_error, shared):
    async def run():
        async with Running(stand, limit=2, shared=shared) as r:
            streams = [await r.stream(), await r.stream()]
            refused = await r.client.post("/v1/echo", content=b"x")
            assert openai_error(refused)["code"] == 429
            assert refused.headers["retry-after"] == "1"
            for path in ("/health", "/metrics", "/v1/nothing"):  # what is only read is not limited
                assert (await r.client.get(path)).status_code != 429
            counts = (await r.client.get("/mla/info")).json()["server"]
            assert counts == {"draining": False, "http_requests": 2, "refused": 1}
            r.release()
            assert [await s for s in streams] == [DONE, DONE]
            assert (await r.client.post("/v1/echo", content=b"x")).status_code == 200
            assert r.stand.gate.running == 0

    asyncio.run(run())


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("root_path", ["", "/proxied"])
def test_what_controls_the_engine_is_not_limited(stand, shared, root_path):
    """Paused requests would fill the server for ever."""

    async def run():
        async with Running(stand, limit=1, shared=shared, root_path=root_path) as r:
            stream = await r.stream()
            for path in ("/pause", "/sleep", "/abort_requests", "/inference/v1/abort_requests"):
                assert (await r.client.post(root_path + path)).status_code == 404  # vLLM's
            assert (await r.client.post("/v1/responses/resp_1/cancel")).status_code == 404
            for path in ("/tokenize", "/v1/responses", "/v1/responses/a/b/cancel", "/v1/resume"):
                assert (await r.client.post(path)).status_code == 429
            assert (await r.client.post("/resume")).status_code == 200
            assert await stream == DONE
            assert r.stand.gate.running == 0

    asyncio.run(run())


def test_a_client_that_leaves_is_no_longer_counted(stand):
    async def run():
        async with Running(stand) as r:
            stream = await r.stream()
            assert r.stand.gate.running == 1
            stream.cancel()
            for _ in range(100):
                if r.stand.gate.running == 0:
                    break
                await asyncio.sleep(0.02)
            assert r.stand.gate.running == 0

    asyncio.run(run())


@pytest.mark.parametrize("behind", [0, 1, 3])
@pytest.mark.parametrize("leave", ["close", "abort"])
def test_a_client_that_has_sent_its_next_requests_and_leaves(stand, leave, behind):
    """uvicorn would stop reading at the second, and tell only the last that the client has gone."""

    async def run():
        s = stand()
        protocol = partial(HeadLimit, max_bytes=10_000, max_headers=20)
        async with connected(s.app, protocol) as (reader, writer, _):
            writer.write(b"POST /v1/stream HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n")
            await asyncio.wait_for(reader.readuntil(b"data: 2"), WAIT_SECONDS)
            for _ in range(behind):
                writer.write(b"POST /v1/echo HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\n\r\nx")
                await asyncio.sleep(0.05)
            assert s.gate.running == 1
            writer.close() if leave == "close" else writer.transport.abort()
            for _ in range(100):
                if s.gate.running == 0:
                    break
                await asyncio.sleep(0.02)
            assert s.gate.running == 0
            assert s.events == ["cancelled"]  # nor were the next ones run

    asyncio.run(run())


@pytest.mark.parametrize("own", [False, True])
def test_a_crash_takes_no_other_request_of_its_connection_along(stand, monkeypatch, own, capfd):
    async def run():
        async with Running(stand) as r:
            if own:  # a route of ours instead of vLLM's
                monkeypatch.setattr(r.stand.engine.vllm_config, "cache_config", None)
            path = b"GET /mla/info" if own else b"POST /v1/fail?how=crash"
            host = r.client.base_url
            reader, writer = await asyncio.open_connection(host.host, host.port)
            writer.write(path + b" HTTP/1.1\r\nHost: x\r\n\r\n")
            writer.write(b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            answers = await asyncio.wait_for(reader.read(), WAIT_SECONDS)
            assert answers.startswith(b"HTTP/1.1 500 ")
            assert answers.endswith(b'{"from":"vllm"}')
            writer.close()

    asyncio.run(run())
    assert capfd.readouterr().err.count("Exception in ASGI application") == 1


def test_a_crash_amid_an_answer_shows(stand):
    async def run():
        async with Running(stand) as r:
            with pytest.raises(httpx.RemoteProtocolError):
                await r.client.post("/v1/fail?how=amid")

    asyncio.run(run())


async def late(stand, query, path="/v1/late"):
    """The lines of a stream, and whether it was cut off."""
    async with Running(stand) as r, r.client.stream("POST", f"{path}?{query}") as answer:
        lines = []
        try:
            async for line in answer.aiter_lines():
                lines.append(line)
        except httpx.RemoteProtocolError:
            return lines, True
        return lines, False


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize(
    ("how", "status", "kind", "message", "param"),
    [
        ("field", 422, "UnprocessableEntityError", "too large", "top_logprobs"),
        ("value", 400, "BadRequestError", "not like this", None),
    ],
)
def test_a_refusal_amid_a_stream_is_an_event(
    stand, named, how, status, kind, message, param, capfd
):
    """As the application answers where it does not stream; nothing of it is in the log."""
    lines, cut = asyncio.run(late(stand, f"how={how}&named={named}"))
    names = ["event: x", "event: error"]
    assert [line for line in lines if line.startswith("event:")] == (names if named else [])
    first, second = (json.loads(line[6:]) for line in lines if line.startswith("data: "))
    error = {"message": message, "type": kind, "param": param, "code": status}
    assert (first, second["error"]) == (0, error)
    assert not cut
    assert "Exception" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("how", "name"), [("type", "TypeError"), ("nan", "ValueError"), ("own", "ZeroDivisionError")]
)
def test_a_crash_amid_a_stream_is_an_event_and_shows(stand, how, name, capfd):
    lines, cut = asyncio.run(late(stand, f"how={how}"))
    assert [line for line in lines if line.startswith("event:")] == ["event: x", "event: error"]
    error = json.loads(lines[-2].removeprefix("data: "))["error"]
    assert (error["message"], error["code"]) == (f"Internal error: {name}", 500)
    assert cut
    log = capfd.readouterr().err
    assert log.count("Exception in ASGI application") == 1 and f"\n{name}: " in log


@pytest.mark.parametrize("path", ["/v1/late", "/v1/responses"])
@pytest.mark.parametrize("how, code", [("field", 422), ("own", 500)])
def test_the_first_event_of_a_stream_has_a_name_where_the_route_gives_them(stand, path, how, code):
    lines, _ = asyncio.run(late(stand, f"how={how}&events_first=0", path))
    *name, data = [line for line in lines if line]
    assert json.loads(data.removeprefix("data: "))["error"]["code"] == code
    assert name == (["event: error"] if path == "/v1/responses" else [])
