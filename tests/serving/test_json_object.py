# SPDX-License-Identifier: Apache-2.0
"""JSON bodies that are no object are refused before vLLM sees them; all else arrives unchanged."""

import codecs
import json
import time

import pytest

MARK = b"\xef\xbb\xbf"  # of UTF-8
OTHERS = ("utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be")
JSON = {"content-type": "Application/JSON; charset=utf-8"}


def in_pieces(body):
    async def pieces():
        for i in range(len(body)):
            yield body[i : i + 1]

    return pieces()


@pytest.mark.parametrize(
    "body",
    [
        *(b"[]", b'"a"', b"3", b"null", b" \n[{}]", b"\xff", MARK + b"[]"),
        *(" \n[{}]".encode(encoding) for encoding in OTHERS),
    ],
)
@pytest.mark.parametrize("whole", [True, False])
def test_no_object(stand, openai_error, body, whole):
    s = stand()
    content = body if whole else in_pieces(body)
    answer = s.request("POST", "/v1/echo", content=content, headers=JSON)
    assert openai_error(answer)["code"] == 400
    assert "JSON object" in answer.text
    assert s.events == []


@pytest.mark.parametrize(
    ("body", "headers"),
    [
        (b'{"a": [1]}', JSON),
        (b' \r\n\t{"a": [1]}', JSON),
        (MARK + b' {"a": [1]}', JSON),
        (MARK, JSON),
        (codecs.BOM_UTF16, JSON),
        *((' \n{"a": "\u00e4"}'.encode(encoding), JSON) for encoding in OTHERS),
        (b"{", JSON),  # vLLM's to refuse
        (b"", JSON),
        (b"   ", JSON),
        (b"[]", {"content-type": "text/plain"}),
        (b"[]", {}),
    ],
)
@pytest.mark.parametrize("whole", [True, False])
def test_the_rest_arrives_unchanged(stand, body, headers, whole):
    content = body if whole else in_pieces(body)
    answer = stand().request("POST", "/v1/echo", content=content, headers=headers)
    assert answer.json() == {"bytes": len(body), "sum": sum(body)}


@pytest.mark.parametrize("encoding", OTHERS)
def test_what_is_refused_of_an_object_is_so_in_each_encoding(stand, openai_error, encoding):
    deep = ('{"a": ' * 200 + "1" + "}" * 200).encode(encoding)
    half = json.dumps({"a": "\ud800"}).encode(encoding)
    for body, said in ((deep, "nests deeper"), (half, "lone surrogate")):
        answer = stand().request("POST", "/v1/echo", content=body, headers=JSON)
        assert said in openai_error(answer)["message"]


def test_much_space_takes_no_longer_than_its_length(stand):
    async def pieces():
        for _ in range(7168):
            yield b" " * 1024
        yield b"[]"

    start = time.perf_counter()
    assert stand().request("POST", "/v1/echo", content=pieces(), headers=JSON).status_code == 400
    assert time.perf_counter() - start < 10  # looking at all of it each time took a minute


def test_a_stream_still_sees_its_client_leave(stand):
    """The middleware hands over what the server says after the body, too."""
    import asyncio

    s = stand()
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/stream",
        "raw_path": b"/v1/stream",
        "query_string": b"",
        "root_path": "",
        "headers": [(b"content-type", b"application/json")],
        "http_version": "1.1",
        "scheme": "http",
        "server": ("test", 80),
        "client": ("test", 1),
    }

    async def run():
        messages = [{"type": "http.request", "body": b"{}", "more_body": False}]

        async def receive():
            return messages.pop(0) if messages else {"type": "http.disconnect"}

        async def send(_):
            pass

        await asyncio.wait_for(s.app(scope, receive, send), 10)

    asyncio.run(run())
    assert s.events == ["cancelled"]
