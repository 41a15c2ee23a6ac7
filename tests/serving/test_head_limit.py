# SPDX-License-Identifier: Apache-2.0
"""The bound on a request's head, over a real socket."""

import asyncio
import json
from functools import partial

import pytest
from mla_serving.server.head_limit import HeadLimit

from tests.serving.connection import connected
from tests.serving.running_app import WAIT_SECONDS

BYTES, HEADERS = 100_000, 20
TOO_LARGE = 431


async def app(scope, receive, send):
    """Answers with the size of the body."""
    size, more = 0, True
    while more:
        message = await receive()
        size += len(message.get("body", b""))
        more = message.get("more_body", False)
    body = b"%d" % size
    headers = [(b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def connection():
    return connected(app, partial(HeadLimit, max_bytes=BYTES, max_headers=HEADERS))


def ask(*pieces):
    """Status and body of the answer to `pieces`, sent one by one until there is an answer."""

    async def run():
        async with connection() as (reader, writer, _):
            answer = asyncio.create_task(reader.readuntil(b"\r\n\r\n"))
            for piece in pieces:
                if answer.done():
                    break
                writer.write(piece)
                await asyncio.sleep(0.01)
            head = await asyncio.wait_for(answer, WAIT_SECONDS)
            length = int(head.lower().partition(b"content-length: ")[2].split()[0])
            body = await reader.readexactly(length)
            closed = head.lower().count(b"connection: close")
            assert bool(closed) == (await _ends(reader))
            return int(head.split()[1]), body

    return asyncio.run(run())


async def _ends(reader):
    try:
        return await asyncio.wait_for(reader.read(1), 0.2) == b""
    except TimeoutError:
        return False


def head(*lines, method="POST"):
    return b"\r\n".join([f"{method} / HTTP/1.1".encode(), b"Host: x", *lines, b"", b""])


def refusal(answer):
    status, body = answer
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["code"] == status
    return status, error["message"]


def test_within_the_limits():
    headers = [b"X: " + b"y" * (BYTES // HEADERS - 100)] * (HEADERS - 2)
    assert ask(head(*headers, b"Content-Length: 3"), b"abc") == (200, b"3")


def test_a_header_that_never_ends():
    pieces = [b"GET / HTTP/1.1\r\nX: ", *[b"y" * 10_000] * 50]
    assert refusal(ask(*pieces)) == (
        TOO_LARGE,
        f"Request head: at most {BYTES} bytes (--h11-max-incomplete-event-size).",
    )


@pytest.mark.parametrize("in_one_piece", [True, False])
def test_many_headers(in_one_piece):
    lines = [b"X: y"] * (HEADERS + 1)
    whole = head(*lines)
    pieces = [whole] if in_one_piece else [line + b"\r\n" for line in whole.split(b"\r\n")]
    assert refusal(ask(*pieces)) == (
        TOO_LARGE,
        f"Request head: at most {HEADERS} headers (--h11-max-header-count).",
    )


def test_a_request_with_too_many_headers_is_not_run(monkeypatch):
    """Its body may be there too: the answer would be computed for nobody."""
    asked, answers = [], app

    async def noted(scope, receive, send):
        asked.append(scope["path"])
        await answers(scope, receive, send)

    monkeypatch.setitem(globals(), "app", noted)
    whole = head(*[b"X: y"] * HEADERS, b"Content-Length: 3") + b"abc"
    assert refusal(ask(whole))[0] == TOO_LARGE
    assert asked == []
    assert ask(head(b"Content-Length: 3") + b"abc") == (200, b"3")
    assert asked == ["/"]


def test_a_trailer_that_never_ends():
    start = head(b"Transfer-Encoding: chunked") + b"3\r\nabc\r\n0\r\nX: "
    assert refusal(ask(start, *[b"y" * 10_000] * 50))[0] == TOO_LARGE


def test_requests_of_one_connection_count_alone():
    one = head(b"X: " + b"y" * (BYTES * 2 // 3), method="GET")
    assert ask(one + one) == (200, b"0")


@pytest.mark.parametrize("chunked", [True, False])
def test_a_body_is_not_counted(chunked):
    piece, pieces = b"z" * 10_000, 50
    if chunked:
        first, sent = head(b"Transfer-Encoding: chunked"), b"2710\r\n" + piece + b"\r\n"
        assert ask(first, *[sent] * pieces, b"0\r\n\r\n") == (200, b"500000")
    else:
        first = head(b"Content-Length: 500000")
        assert ask(first, *[piece] * pieces) == (200, b"500000")


def test_what_is_no_http():
    assert refusal(ask(b"\x16\x03\x01\r\n\r\n")) == (400, "Invalid HTTP request received.")


UPGRADE = [b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: h2c", b"HTTP2-Settings: AAMAAABk"]


@pytest.mark.parametrize("in_one_piece", [True, False])
@pytest.mark.parametrize(
    ("framing", "body"),
    [
        (b"Content-Length: 9", b"GET / a\r\n"),
        (b"Transfer-Encoding: chunked", b"5\r\nabcde\r\n4\r\nfghi\r\n0\r\n\r\n"),
    ],
)
def test_a_body_is_read_where_another_protocol_is_asked_for(framing, body, in_one_piece):
    """As Java's HttpClient asks for HTTP/2."""
    start = head(*UPGRADE, framing)
    assert ask(*([start + body] if in_one_piece else [start[:50], start[50:], body])) == (200, b"9")


def test_requests_behind_those_that_ask_for_another_protocol():
    get, post = head(*UPGRADE, method="GET"), head(*UPGRADE, b"Content-Length: 3") + b"abc"
    plain = head(b"Connection: close", b"Content-Length: 2") + b"ab"

    async def run():
        async with connection() as (reader, writer, _):
            writer.write(post + get + post + plain)
            return await asyncio.wait_for(reader.read(), WAIT_SECONDS)

    answers = asyncio.run(run()).split(b"HTTP/1.1 200 OK")
    assert [answer[-1:] for answer in answers[1:]] == [b"3", b"0", b"3", b"2"]


def test_a_head_is_limited_where_another_protocol_is_asked_for():
    assert refusal(ask(head(*UPGRADE, *[b"X: y"] * HEADERS)))[0] == TOO_LARGE
    trailer = head(*UPGRADE, b"Transfer-Encoding: chunked") + b"3\r\nabc\r\n0\r\nX: "
    assert refusal(ask(trailer, *[b"y" * 10_000] * 50))[0] == TOO_LARGE
