# SPDX-License-Identifier: Apache-2.0
"""A connection without a request ends, over a real socket, with both of uvicorn's parsers."""

import asyncio
import json
from functools import partial

import pytest
from mla_serving.server.head_limit import HeadLimit
from mla_serving.server.head_wait_h11 import H11Wait

from tests.serving.connection import connected

SECONDS, LONGER = 0.3, 0.9
HEAD = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n"
WEBSOCKET = (
    b"GET / HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
)


@pytest.fixture(params=["httptools", "h11"])
def protocol(request):
    if request.param == "h11":
        return partial(H11Wait, seconds=SECONDS)
    return partial(HeadLimit, max_bytes=10_000, max_headers=20, seconds=SECONDS)


def answering(reads=True, wait=0.0):
    """An application that answers "ok", after a while, of a body that it reads or does not."""

    async def app(scope, receive, send):
        if scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.accept"})
            await receive()
            return
        while reads and (await receive()).get("more_body"):
            pass
        await asyncio.sleep(wait)
        headers = [(b"content-length", b"2")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"ok"})

    return app


def run(protocol, client, app=None):
    """What `client` returns, of a reader, a writer and the server's state."""

    async def whole():
        async with connected(app or answering(), protocol) as (reader, writer, state):
            return await asyncio.wait_for(client(reader, writer, state), 10)

    return asyncio.run(whole())


async def ok(reader):
    assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
    assert await reader.readexactly(2) == b"ok"


def refused(answer):
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408 ") and b"connection: close" in head
    error = json.loads(body)["error"]
    return error["message"] == f"No whole head of a request came within {SECONDS:g} seconds."


def test_who_sends_nothing(protocol):
    async def client(reader, writer, state):
        assert await reader.read() == b""
        await asyncio.sleep(0)
        return len(state.connections)

    assert run(protocol, client) == 0


def test_half_a_head(protocol):
    async def client(reader, writer, state):
        writer.write(HEAD)
        return await reader.read()

    assert refused(run(protocol, client))


def test_a_head_that_drips(protocol):
    """A byte more is no more time."""

    async def client(reader, writer, state):
        answer = asyncio.create_task(reader.read())
        for i in range(len(HEAD)):
            writer.write(HEAD[i : i + 1])
            await asyncio.sleep(SECONDS / 10)
            if answer.done():
                return await answer
        raise AssertionError("the whole head was waited for")

    assert refused(run(protocol, client))


def test_half_a_head_behind_a_request(protocol):
    async def client(reader, writer, state):
        writer.write(HEAD + b"\r\nabc")
        await ok(reader)
        writer.write(HEAD)
        return await reader.read()

    assert refused(run(protocol, client))


def test_the_rest_of_a_body_that_nobody_waited_for():
    """uvicorn's own timer does not begin anew behind it. Its h11 closes such a connection."""

    async def client(reader, writer, state):
        writer.write(HEAD + b"\r\n")
        await ok(reader)
        writer.write(b"abc")
        return await reader.read()

    httptools = partial(HeadLimit, max_bytes=10_000, max_headers=20, seconds=SECONDS)
    assert refused(run(httptools, client, answering(reads=False)))


def test_between_requests_the_wait_is_uvicorns(protocol):
    async def client(reader, writer, state):
        for _ in range(2):
            writer.write(HEAD + b"\r\nabc")
            await ok(reader)
            await asyncio.sleep(LONGER)
        return len(state.connections)

    assert run(protocol, client) == 1


def test_an_answer_may_take_longer(protocol):
    async def client(reader, writer, state):
        writer.write(HEAD[:20])
        await asyncio.sleep(SECONDS / 3)
        writer.write(HEAD[20:] + b"\r\nabc")
        await ok(reader)

    run(protocol, client, answering(wait=LONGER))


def test_h11_is_what_a_server_without_httptools_has(monkeypatch):
    from mla_serving.server import http

    monkeypatch.setattr(http, "find_spec", lambda name: None)
    assert http._protocol(None) is H11Wait


def test_a_websocket_stays(protocol):
    async def client(reader, writer, state):
        writer.write(WEBSOCKET)
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 101")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.read(1), LONGER)

    run(protocol, client)
