# SPDX-License-Identifier: Apache-2.0
"""Read the body of a request that asks for another protocol too, as Java's HttpClient asks for
HTTP/2 with every first request.

A server may ignore that (RFC 9110, 7.8), and uvicorn means to, but httptools takes all behind the
head for the other protocol's: the body would be lost, or be read as the next request.
"""

import contextlib
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_FRAMING = (b"content-length", b"transfer-encoding")


class _Parser(httptools.HttpRequestParser):
    """A parser that hands what follows the head of such a request to another one."""

    def __init__(self, protocol: "IgnoreUpgrade") -> None:
        super().__init__(protocol)
        self._protocol = protocol
        with contextlib.suppress(AttributeError):  # httptools < 0.6.3; as in uvicorn
            self.set_dangerous_leniencies(lenient_data_after_close=True)

    def feed_data(self, data: Any) -> None:
        try:
            super().feed_data(data)
        except httptools.HttpParserUpgrade as stop:
            if self._protocol._should_upgrade():  # to a websocket
                raise
            self._protocol.read_on(data[stop.args[0] :])


class IgnoreUpgrade(HttpToolsProtocol):
    """uvicorn's HTTP protocol, of which only an upgrade to websockets has an effect."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.parser = _Parser(self)
        self._repeated = False  # the head that is parsed was seen before

    def read_on(self, rest: bytes) -> None:
        """Parse `rest`, what lies behind the head that was just parsed."""
        framing = [b"%s: %s\r\n" % header for header in self.headers if header[0] in _FRAMING]
        self.parser = _Parser(self)
        self._repeated = True
        self.parser.feed_data(b"POST / HTTP/1.1\r\n" + b"".join(framing) + b"\r\n")
        self.parser.feed_data(rest)

    def on_message_begin(self) -> None:
        if not self._repeated:
            super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        if not self._repeated:
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._repeated:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if not self._repeated:
            super().on_headers_complete()
        self._repeated = False

    def on_message_complete(self) -> None:
        if not self.parser.should_upgrade() or self._should_upgrade():
            super().on_message_complete()
