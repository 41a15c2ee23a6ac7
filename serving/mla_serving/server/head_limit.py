# SPDX-License-Identifier: Apache-2.0
"""Bound the head of a request: uvicorn has httptools keep any number of header bytes.

The time for it grows with their square, in the event loop: one client that never ends a header
would stop the server for all others. vLLM's limits are for h11, which runs only where httptools
is missing.
"""

from http import HTTPStatus
from typing import Any

from mla_serving.server.head_wait import HeadWait
from mla_serving.server.pipelining import Pipelining
from mla_serving.server.upgrade import IgnoreUpgrade


class HeadLimit(HeadWait, Pipelining, IgnoreUpgrade):
    """uvicorn's HTTP protocol: 431 for a head above `max_bytes` or `max_headers`.

    Also gives the 400 of what is no HTTP the shape of all other errors.
    """

    def __init__(self, *args: Any, max_bytes: int, max_headers: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._max_bytes = max_bytes
        self._max_headers = max_headers
        self._head_bytes = 0  # since the last piece of a body or end of a request

    def data_received(self, data: bytes) -> None:
        self._head_bytes += len(data)
        super().data_received(data)
        if self._head_bytes > self._max_bytes:
            self._refuse_head(f"{self._max_bytes} bytes (--h11-max-incomplete-event-size)")

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        if len(self.headers) == self._max_headers + 1:
            self._refuse_head(f"{self._max_headers} headers (--h11-max-header-count)")
            raise ValueError("stop parsing")

    def on_body(self, body: bytes) -> None:
        self._head_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._head_bytes = 0
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        self.answer(HTTPStatus.BAD_REQUEST, msg)

    def _refuse_head(self, most: str) -> None:
        self.answer(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, f"Request head: at most {most}.")
