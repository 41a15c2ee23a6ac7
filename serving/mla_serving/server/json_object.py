# SPDX-License-Identifier: Apache-2.0
"""Refuse a JSON body that is no object: vLLM 0.26 answers a list or a string with 500."""

from collections import deque

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mla_serving.server.errors import error_response
from mla_serving.server.replay import replay

# Windows programs begin a text with the mark of UTF-8, which a parser of JSON may skip (RFC 8259).
_MARK = b"\xef\xbb\xbf"
_JSON_SPACE = b" \t\r\n"


class JsonObject:
    """ASGI middleware: 400 for application/json that does not begin with a brace."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not is_json(Headers(scope=scope)):
            return await self.app(scope, receive, send)
        messages: deque[Message] = deque()
        seen = start = b""
        while not start or _MARK.startswith(seen):
            message = await receive()
            messages.append(message)
            seen = seen if _MARK.startswith(seen) else b" "  # it was space, of which one is enough
            seen += message.get("body", b"")
            start = seen.removeprefix(_MARK).lstrip(_JSON_SPACE)
            if not message.get("more_body"):
                break
        if start and not start.startswith(b"{"):
            refusal = error_response(400, "The body must be a JSON object.")
            return await refusal(scope, receive, send)
        await self.app(scope, replay(messages, receive), send)


def is_json(headers: Headers) -> bool:
    """Whether a request says that its body is JSON; what says otherwise vLLM refuses."""
    return headers.get("content-type", "").partition(";")[0].strip().lower() == "application/json"
