# SPDX-License-Identifier: Apache-2.0
"""Refuse request bodies above a size before anything parses them."""

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mla_serving.server.errors import error_response

# Read and dropped after a refusal: a client that is still sending reads the answer only when its
# body has gone out. Beyond this the connection is just closed.
_DISCARD_BYTES = 64 * 1024 * 1024


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
                return await self._refuse(scope, receive, send)
            return await self.app(scope, receive, send)
        if "transfer-encoding" not in headers:
            return await self.app(scope, receive, send)
        messages, fits = await self._read(receive)
        if not fits:
            ended = not messages[-1].get("more_body")
            return await self._refuse(scope, receive, send, ended)

        async def replay() -> Message:
            return messages.pop(0) if messages else await receive()

        await self.app(scope, replay, send)

    async def _read(self, receive: Receive) -> tuple[list[Message], bool]:
        """The messages of a chunked body, and whether it is within the limit: then all of them."""
        messages, size = [], 0
        while True:
            message = await receive()
            messages.append(message)
            size += len(message.get("body", b""))
            if size > self.limit:
                return messages, False
            if not message.get("more_body"):
                return messages, True

    async def _refuse(
        self, scope: Scope, receive: Receive, send: Send, ended: bool = False
    ) -> None:
        """ended: the body has been read to its end, and there is nothing to wait for."""
        # Who asks first (curl does from 1 MiB on) has sent nothing: reading would say "go on".
        waits = Headers(scope=scope).get("expect", "").lower() == "100-continue"
        left = 0 if waits or ended else _DISCARD_BYTES
        while left > 0:
            message = await receive()
            left -= len(message.get("body", b""))
            if not message.get("more_body"):
                break
        text = f"Request body too large: at most {self.limit} bytes (--mla-max-body-mib)."
        await error_response(413, text, {"Connection": "close"})(scope, receive, send)
