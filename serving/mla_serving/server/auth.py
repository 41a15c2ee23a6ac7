# SPDX-License-Identifier: Apache-2.0
"""Bearer-token check on every route but those that are said to be open.

vLLM's own check covers only /v1 and a few more; /metrics, /docs and ours would stay open.
"""

import hashlib
import hmac
from collections.abc import Iterable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from mla_serving.server.errors import error_response
from mla_serving.server.paths import route_path


class ApiKey:
    """ASGI middleware: 401 unless `Authorization: Bearer KEY` carries one of `keys`, or the route
    is one of `open_paths`."""

    def __init__(self, app: ASGIApp, keys: Iterable[str], open_paths: Iterable[str]) -> None:
        self.app = app
        self._open_paths = frozenset(open_paths)
        self._digests = [_digest(key) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket") or self._open(scope):
            return await self.app(scope, receive, send)
        key = _sent(scope)
        if key is not None and self._known(key):
            return await self.app(_with_one_space(scope, key), receive, send)
        if scope["type"] == "websocket":
            return await send({"type": "websocket.close", "code": 1008})
        message = "Missing or wrong API key: send the header `Authorization: Bearer YOUR_KEY`."
        refusal = error_response(401, message, {"WWW-Authenticate": "Bearer"})
        await refusal(scope, receive, send)

    def _open(self, scope: Scope) -> bool:
        return scope["type"] == "http" and route_path(scope) in self._open_paths

    def _known(self, key: str) -> bool:
        given = _digest(key)
        # Every key is compared, in constant time, so that timing tells nothing of any of them.
        return sum(hmac.compare_digest(given, known) for known in self._digests) > 0


def _sent(scope: Scope) -> str | None:
    scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else None


def _with_one_space(scope: Scope, key: str) -> Scope:
    """vLLM's check, which comes behind ours, takes further ones for a part of the key."""
    headers = [header for header in scope["headers"] if header[0].lower() != b"authorization"]
    return {**scope, "headers": [*headers, (b"authorization", f"Bearer {key}".encode("latin-1"))]}


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
