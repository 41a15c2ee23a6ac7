# SPDX-License-Identifier: Apache-2.0
"""Counters beside vLLM's in /metrics: its own see nothing of what is refused before its routes."""

from prometheus_client import Counter, Gauge
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mla_serving.server.admission import Gate

_ANSWERS = Counter("mla_http_answers", "HTTP answers as clients got them, by status.", ["status"])
_RUNNING = Gauge("mla_http_requests_running", "HTTP requests taken and not yet answered in full.")
_DRAINING = Gauge("mla_draining", "1 while the server finishes what runs and takes nothing new.")


def show(gate: Gate) -> None:
    """Let the gauges say what `gate` knows."""
    _RUNNING.set_function(lambda: gate.running)
    _DRAINING.set_function(lambda: gate.draining)


class Counted:
    """ASGI middleware: every HTTP answer counts, by its status."""

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
