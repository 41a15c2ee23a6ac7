# SPDX-License-Identifier: Apache-2.0
"""Refuse a JSON body that is no object: vLLM 0.26 answers a list or a string with 500."""

import codecs
import json
from collections import deque

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mla_serving.server.errors import error_response
from mla_serving.server.replay import replay

# Bytes that tell UTF-8, 16 and 32 apart, with the marks that Windows programs begin a text with.
_TELLING = 4
_JSON_SPACE = " \t\r\n"


class JsonObject:
    """ASGI middleware: 400 for application/json that does not begin with a brace, in UTF-8,
    16 or 32."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not is_json(Headers(scope=scope)):
            return await self.app(scope, receive, send)
        messages: deque[Message] = deque()
        unread, start, decoder = b"", "", None
        while not start:
            message = await receive()
            messages.append(message)
            unread += message.get("body", b"")
            more = message.get("more_body")
            if len(unread) >= _TELLING or not more:
                # As vLLM's parser takes them.
                encoding = json.detect_encoding(unread)
                decoder = decoder or codecs.getincrementaldecoder(encoding)("replace")
                start = decoder.decode(unread).lstrip(_JSON_SPACE)
                unread = b""
            if not more:
                break
        if start and not start.startswith("{"):
            refusal = error_response(400, "The body must be a JSON object.")
            return await refusal(scope, receive, send)
        await self.app(scope, replay(messages, receive), send)


def is_json(headers: Headers) -> bool:
    """Whether a request says that its body is JSON; what says otherwise vLLM refuses."""
    return headers.get("content-type", "").partition(";")[0].strip().lower() == "application/json"
