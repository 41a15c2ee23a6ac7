# SPDX-License-Identifier: Apache-2.0
"""Wait for the parts of a request's body only so long: it has its place among the running ones."""

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mla_serving.server.errors import error_response

# From one part of a body to the next, as other servers wait.
SECONDS = 60.0


class _LateError(Exception):
    """The next part did not come; whoever was reading has no use for what came before."""


class BodyWait:
    """ASGI middleware: 408 where the next part of a body does not come within `seconds`."""

    def __init__(self, app: ASGIApp, seconds: float = SECONDS) -> None:
        self.app = app
        self.seconds = seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        ended = late = started = False

        async def receive_in_time() -> Message:
            nonlocal ended, late
            while not (ended or started):  # what comes later is that the client has gone
                try:
                    message = await asyncio.wait_for(receive(), self.seconds)
                except TimeoutError:
                    if started:  # an answer that streams listens meanwhile
                        continue
                    late = True
                    raise _LateError from None
                ended = not message.get("more_body")
                return message
            return await receive()

        async def send_in_time(message: Message) -> None:
            nonlocal started
            if started or not late:  # else FastAPI's word on the error above
                started = True
                await send(message)

        try:
            await self.app(scope, receive_in_time, send_in_time)
        except Exception:
            if not late:
                raise
        if late and not started:
            text = f"The request's body stopped for {self.seconds:g} seconds."
            await error_response(408, text, {"Connection": "close"})(scope, receive, send)
