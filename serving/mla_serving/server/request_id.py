# SPDX-License-Identifier: Apache-2.0
"""--enable-request-id-headers for what never reaches vLLM's middleware of that option: refusals."""

import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_NAME = "x-request-id"


class RequestId:
    """ASGI middleware: every HTTP answer has the X-Request-Id of its request, or one that is made
    up, as vLLM's has it."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(raw=list(message.get("headers", ())))
                headers.setdefault(_NAME, Headers(scope=scope).get(_NAME) or uuid.uuid4().hex)
                message = {**message, "headers": headers.raw}
            await send(message)

        await self.app(scope, receive, send_named)
