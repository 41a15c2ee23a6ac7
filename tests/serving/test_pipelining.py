# SPDX-License-Identifier: Apache-2.0
"""Clients that send their next requests before an answer: all are answered, and few are read."""

import asyncio
from functools import partial

import pytest
from mla_serving.server.head_limit import HeadLimit

from tests.serving.connection import connected

# What may have been read ahead: uvicorn's bound of a body, and a piece of what asyncio reads.
MOST = 64 * 1024 + 256 * 1024
GET = b"GET /%d HTTP/1.1\r\nHost: x\r\nX: " + b"y" * 1000 + b"\r\n\r\n"


def application(first):
    """Answers with the path and the body's size, once `first` is set."""

    async def app(scope, receive, send):
        await first.wait()
        size, more = 0, True
        while more:
            message = await receive()
            size += len(message.get("body", b""))
            more = message.get("more_body", False)
        body = b"%s %d;" % (scope["path"].encode(), size)
        headers = [(b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    return app


def run(client):
    """What `client` returns, of a reader, a writer, the protocol and what lets the first answer."""

    async def whole():
        first = asyncio.Event()
        protocol = partial(HeadLimit, max_bytes=10_000, max_headers=20)
        async with connected(application(first), protocol) as (reader, writer, state):
            while not state.connections:
                await asyncio.sleep(0.01)
            (served,) = state.connections
            return await asyncio.wait_for(client(reader, writer, served, first), 30)

    return asyncio.run(whole())


async def bodies(reader, count):
    found = []
    for _ in range(count):
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200")
        found.append((await reader.readuntil(b";")).decode())
    return found


@pytest.mark.parametrize("pause", [0, 0.02])
def test_all_are_answered_in_order(pause):
    post = b"POST /%d HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s"
    sizes = [0, 5, 300_000, 0, 100_000, 3]  # more than is read ahead, too

    async def client(reader, writer, served, first):
        for i, size in enumerate(sizes):
            writer.write(post % (i, size, b"z" * size))
            await asyncio.sleep(pause)
        first.set()
        return await bodies(reader, len(sizes))

    assert run(client) == [f"/{i} {size};" for i, size in enumerate(sizes)]


def test_without_end_they_are_not_read_ahead_of_the_first():
    async def client(reader, writer, served, first):
        writer.write(b"".join(GET % i for i in range(5000)))
        await asyncio.sleep(0.5)
        return len(served.pipeline)

    assert 0 < run(client) <= MOST / len(GET)


def test_without_end_they_are_not_read_ahead_of_any():
    """An answer is no reason to read more than was answered."""
    count = 5000

    async def client(reader, writer, served, first):
        writer.write(b"".join(GET % i for i in range(count)))
        await asyncio.sleep(0.2)
        first.set()
        answers = asyncio.create_task(bodies(reader, count))
        most = 0
        while not answers.done():
            most = max(most, len(served.pipeline))
            await asyncio.sleep(0)
        assert await answers == [f"/{i} 0;" for i in range(count)]
        return most

    assert 0 < run(client) <= MOST / len(GET)
