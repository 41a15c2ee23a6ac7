# SPDX-License-Identifier: Apache-2.0
"""Read on where a client sends its next request before the answer: a client that leaves is noticed
by reading. uvicorn stops at the next request until the answer is complete, and tells the last
request alone that its client has gone: the first would be computed to its end, for nobody.
"""

from collections import deque
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT, FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle


class _Flow(FlowControl):
    """uvicorn's, which goes on reading only where `may_read`."""

    def __init__(self, transport: Any, may_read: Callable[[], bool]) -> None:
        super().__init__(transport)
        self._may_read = may_read

    def resume_reading(self) -> None:
        if self._may_read():
            super().resume_reading()


class Pipelining(HttpToolsProtocol):
    """uvicorn's HTTP protocol, which reads so much (uvicorn's bound for a body) of the requests
    behind the one that it answers, and no more until it answers the last of them. Of who sends
    more, and leaves, it hears when it writes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._unanswered: deque[RequestResponseCycle] = deque()
        self._ahead = 0  # bytes read since requests wait

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        # uvicorn would go on with each answer, for more than was answered.
        self.flow = _Flow(transport, lambda: self._ahead <= HIGH_WATER_LIMIT)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        for cycle in self._unanswered:
            cycle.disconnected = True
            cycle.message_event.set()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.pipeline and not self.transport.is_closing():
            self._ahead += len(data)
            self.flow.resume_reading()

    def on_headers_complete(self) -> None:
        before = self.cycle
        super().on_headers_complete()
        if self.cycle is not before:
            self._unanswered.append(self.cycle)

    def on_response_complete(self) -> None:
        self._unanswered.popleft()
        super().on_response_complete()
        if not self.pipeline and not self.transport.is_closing():
            self._ahead = 0
            self.flow.resume_reading()
