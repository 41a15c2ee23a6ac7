# SPDX-License-Identifier: Apache-2.0
"""Refuse request bodies above a size before anything parses them."""

import asyncio
from collections import deque

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mla_serving.server.errors import error_response
from mla_serving.server.replay import replay

# Read and dropped after a refusal: a client that is still sending reads the answer only when its
# body has gone out. Beyond this, or so long after the refusal, it is answered all the same and the
# connection closed: who stalls or drips would keep a place among the running requests.
_DISCARD_BYTES = 64 * 1024 * 1024
_DISCARD_SECONDS = 5.0


class BodyLimit:
    """ASGI middleware: 413 for a body above `limit` bytes, declared or chunked."""

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self.app = app
        self.limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        headers = Headers(scope=scope)
        length = headers.get("content-length")
        if length is not None and length.isdigit():  # the HTTP parser holds the client to it
            if int(length) > self.limit:
                # Who asks first (curl does from 1 MiB on) has sent nothing: reading would say "go
                # on".
                asks = headers.get("expect", "").lower() == "100-continue"
                return await self._refuse(scope, receive, send, discard=not asks)
            return await self.app(scope, receive, send)
        if "transfer-encoding" not in headers:
            return await self.app(scope, receive, send)
        messages, fits = await self._read(receive)
        if not fits:
            discard = bool(messages[-1].get("more_body"))
            return await self._refuse(scope, receive, send, discard)
        await self.app(scope, replay(messages, receive), send)

    async def _read(self, receive: Receive) -> tuple[deque[Message], bool]:
        """The messages of a chunked body, and whether it is within the limit: then all of them."""
        messages: deque[Message] = deque()
        size = 0
        while True:
            message = await receive()
            messages.append(message)
            size += len(message.get("body", b""))
            if size > self.limit:
                return messages, False
            if not message.get("more_body"):
                return messages, True

    async def _refuse(self, scope: Scope, receive: Receive, send: Send, discard: bool) -> None:
        """discard: more of the body is on its way."""
        left = _DISCARD_BYTES if discard else 0
        clock = asyncio.get_running_loop().time
        until = clock() + _DISCARD_SECONDS
        while left > 0 and (seconds := until - clock()) > 0:
            try:
                message = await asyncio.wait_for(receive(), seconds)
            except TimeoutError:
                break
            left -= len(message.get("body", b""))
            if not message.get("more_body"):
                break
        text = f"Request body too large: at most {self.limit} bytes (--mla-max-body-mib)."
        await error_response(413, text, {"Connection": "close"})(scope, receive, send)
