# SPDX-License-Identifier: Apache-2.0
"""Which requests are taken: none while draining, at most `limit` at once otherwise."""

import asyncio
import re

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from mla_serving.server.errors import error_response
from mla_serving.server.paths import route_path
from mla_serving.server.shared_gate import SharedGate

# Answered during a drain too: what watches the server must see it drain.
_ALWAYS = ("/health", "/metrics", "/mla/info")
# What lets running requests go on or ends them: taken during a drain too, which waits for these.
_FREEING = re.compile(r"/(resume|wake_up|(inference/v1/)?abort_requests|v1/responses/[^/]+/cancel)")
# vLLM's other routes that are posted to and compute no answer: taken however many requests run.
_CONTROL = {
    "/collective_rpc",
    "/fault_tolerance/apply",
    "/finish_weight_update",
    "/init_weight_transfer_engine",
    "/is_scaling_elastic_ep",
    "/pause",
    "/ping",
    "/release_kv_cache_memory",
    "/reset_encoder_cache",
    "/reset_mm_cache",
    "/reset_prefix_cache",
    "/scale_elastic_ep",
    "/shutdown_weight_transfer_engine",
    "/sleep",
    "/start_draft_weight_update",
    "/start_profile",
    "/start_weight_update",
    "/stop_profile",
    "/update_weight_version",
    "/update_weights",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    "/weight_checker",
}
STOPPING = "The server is shutting down."


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

    def enter(self, limited: bool = False) -> bool:
        """Count one more request; False, and it is not, while the gate drains, or where it is
        `limited` and as many as may run do."""
        if self.draining or (limited and 0 < self.limit <= self.running):
            self.refused += 1
            return False
        self.running += 1
        self._idle.clear()
        return True

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


AnyGate = Gate | SharedGate


class Admission:
    """ASGI middleware before the Gate: 503 while it drains, 429 when it is full; neither for what
    would empty it."""

    def __init__(self, app: ASGIApp, gate: AnyGate) -> None:
        self.app = app
        self.gate = gate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gate = self.gate
        if scope["type"] not in ("http", "websocket") or (path := route_path(scope)) in _ALWAYS:
            return await self.app(scope, receive, send)
        posts = scope.get("method") == "POST"
        frees = posts and _FREEING.fullmatch(path) is not None
        counted = not (frees and gate.draining)  # the drain waits for what it frees
        limited = posts and not frees and path not in _CONTROL
        if counted and not gate.enter(limited):
            if scope["type"] == "websocket":
                return await send({"type": "websocket.close", "code": 1013})
            refusal = stopping() if gate.draining else _too_many(gate.limit)
            return await refusal(scope, receive, send)
        try:
            await self.app(scope, receive, send)
        finally:
            if counted:
                gate.leave()


def _too_many(limit: int) -> Response:
    text = f"Too many requests: {limit} are running (--mla-max-requests)."
    return error_response(429, text, {"Retry-After": "1"})


def stopping() -> Response:
    """The answer of a server that drains."""
    headers = {"Retry-After": "5", "Connection": "close"}
    return error_response(503, STOPPING, headers)
