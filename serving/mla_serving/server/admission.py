# SPDX-License-Identifier: Apache-2.0
"""Which requests are taken: none while draining, at most `limit` at once otherwise."""

import asyncio

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mla_serving.server.errors import error_response
from mla_serving.server.paths import route_path

# Answered during a drain too: what watches the server must see it drain.
_ALWAYS = ("/health", "/metrics", "/mla/info")


class Gate:
    """The state that the middleware and the shutdown share.

    `running` counts the requests taken and not yet answered in full, `limit` (0: none) how many
    there may be, `draining` closes the gate.
    """

    def __init__(self, limit: int = 0) -> None:
        self.limit = limit
        self.running = 0
        self.refused = 0
        self.draining = False
        self._idle = asyncio.Event()
        self._idle.set()

    def enter(self) -> None:
        self.running += 1
        self._idle.clear()

    def leave(self) -> None:
        self.running -= 1
        if self.running == 0:
            self._idle.set()

    async def wait_idle(self, timeout: float) -> bool:
        """True once no request is running, False when `timeout` seconds were not enough."""
        try:
            await asyncio.wait_for(self._idle.wait(), timeout)
        except TimeoutError:
            return False
        return True


class Admission:
    """ASGI middleware before the Gate: 503 while it drains and for what that cuts short, 429 when
    it is full."""

    def __init__(self, app: ASGIApp, gate: Gate) -> None:
        self.app = app
        self.gate = gate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gate = self.gate
        if scope["type"] not in ("http", "websocket") or route_path(scope) in _ALWAYS:
            return await self.app(scope, receive, send)
        refusal = None
        if gate.draining:
            refusal = _stopping()
        elif gate.limit and gate.running >= gate.limit and scope.get("method") == "POST":
            text = f"Too many requests: {gate.limit} are running (--mla-max-requests)."
            refusal = error_response(429, text, {"Retry-After": "1"})
        if refusal is not None:
            gate.refused += 1
            if scope["type"] == "websocket":
                return await send({"type": "websocket.close", "code": 1013})
            return await refusal(scope, receive, send)
        started = False

        async def send_noted(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        gate.enter()
        try:
            await self.app(scope, receive, send_noted)
        except asyncio.CancelledError:
            # uvicorn cancels what outlives the drain, and would answer 500 and log a traceback.
            if not gate.draining or scope["type"] != "http":
                raise
            if not started:
                await _stopping()(scope, receive, send)
        finally:
            gate.leave()


def _stopping() -> Response:
    headers = {"Retry-After": "5", "Connection": "close"}
    return error_response(503, "The server is shutting down.", headers)
