# SPDX-License-Identifier: Apache-2.0
"""Wait for the head of a request only so long: uvicorn's own timer runs only between an answer and
the next byte. Who sends nothing, or half a head, would keep a connection for ever, without a key.
"""

import asyncio
import json
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from mla_serving.server.body_wait import SECONDS
from mla_serving.server.errors import error_body

if TYPE_CHECKING:
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol as _Protocol
else:
    _Protocol = object


class HeadWait(_Protocol):
    """Before either of uvicorn's HTTP protocols: closes a connection on which for `seconds` no
    request is open and no head is complete; with 408 if any of one has come."""

    def __init__(self, *args: Any, seconds: float = SECONDS, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._seconds = seconds
        self._deadline: asyncio.TimerHandle | None = None
        self._begun = False  # something has come

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._wait()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._begun = True
        self._wait()

    def _wait(self) -> None:
        """A whole head ends the wait, a part of one does not begin it anew."""
        answering = self.cycle is not None and not self.cycle.response_complete
        # A websocket's are no longer among them, nor those that are lost.
        if answering or self not in self.connections:
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None
        elif self._deadline is None:
            self._deadline = self.loop.call_later(self._seconds, self._give_up)

    def _give_up(self) -> None:
        if self._begun:
            text = f"No whole head of a request came within {self._seconds:g} seconds."
            self.answer(HTTPStatus.REQUEST_TIMEOUT, text)
        self.transport.close()

    def answer(self, status: HTTPStatus, message: str) -> None:
        """An error without a request, and the end of the connection."""
        if self.transport.is_closing():  # refused already
            return
        body = json.dumps(error_body(status, message)).encode()
        head = (
            f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()
