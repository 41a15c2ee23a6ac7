# SPDX-License-Identifier: Apache-2.0
"""A counter beside vLLM's in /metrics, which see nothing of what is refused before its routes."""

from prometheus_client import Counter
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_ANSWERS = Counter("mla_http_answers", "HTTP answers, by status.", ["status"])


class Counted:
    """ASGI middleware: every HTTP answer counts, by its status. What has no head that can be read
    (400, 431) never gets here."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                _ANSWERS.labels(message["status"]).inc()
            await send(message)

        await self.app(scope, receive, counted)
