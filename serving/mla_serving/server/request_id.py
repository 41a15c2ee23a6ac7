# SPDX-License-Identifier: Apache-2.0
"""--enable-request-id-headers for what never reaches vLLM's middleware of that option: refusals."""

import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_NAME = "x-request-id"


class RequestId:
    """ASGI middleware: every HTTP answer has the X-Request-Id of its request, or one that is made
    up; vLLM then names the request so too, in its log and in the `id` of an answer."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        given = Headers(scope=scope).get(_NAME)
        name = uuid.uuid4().hex if given is None else given
        if given is None:
            header = (_NAME.encode(), name.encode())
            scope = {**scope, "headers": [*scope["headers"], header]}

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(raw=list(message.get("headers", ())))
                headers.setdefault(_NAME, name)
                message = {**message, "headers": headers.raw}
            await send(message)

        await self.app(scope, receive, send_named)
