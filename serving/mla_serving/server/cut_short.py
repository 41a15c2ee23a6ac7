# SPDX-License-Identifier: Apache-2.0
"""What the end of the drain cuts short: what its client hears, and its end in the engine."""

import asyncio
from contextlib import suppress

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mla_serving.server.admission import STOPPING, AnyGate, stopping
from mla_serving.server.errors import error_event, has_named_events, is_event_stream

# For a client to take the last that it is sent, and for the application to notice; within what
# lifecycle waits for requests that it has cancelled.
_SECONDS = 0.5


class CutShort:
    """ASGI middleware: 503, or in a stream an event that says so, for a request that is cancelled
    while `gate` drains. uvicorn cancels what outlives the drain, and would answer 500 and log a
    traceback.

    What has not begun to answer may notice that its client has an answer, and is cancelled if it
    does not: vLLM's routes without a stream compute in a task of their own, which a cancelled route
    leaves behind. The engine would go on with it, and log a traceback of what becomes of it.
    """

    def __init__(self, app: ASGIApp, gate: AnyGate) -> None:
        self.app = app
        self.gate = gate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        start: Message | None = None
        last: Message = {}  # of those sent
        cut = False

        async def send_until_cut(message: Message) -> None:
            nonlocal start, last
            if not cut:
                start, last = start or message, message
                await send(message)

        answering = asyncio.ensure_future(self.app(scope, receive, send_until_cut))
        try:
            await asyncio.shield(answering)
        except asyncio.CancelledError:
            if not self.gate.draining:
                answering.cancel()
                await asyncio.wait({answering})
                raise
            cut = True
            with suppress(TimeoutError):  # of a client that reads nothing
                async with asyncio.timeout(_SECONDS):
                    if start is None:
                        # To the application, who has its answer has left.
                        await stopping()(scope, receive, send)
                        await asyncio.wait({answering})
                    elif is_event_stream(start) and (last is start or last.get("more_body")):
                        # And no end: it stays an answer that was cut off.
                        event = error_event(503, STOPPING, has_named_events(scope, last))
                        await send({"type": "http.response.body", "body": event, "more_body": True})
            answering.cancel()
            await asyncio.gather(answering, return_exceptions=True)  # nobody hears what it says
