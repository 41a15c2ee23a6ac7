# SPDX-License-Identifier: Apache-2.0
"""Give the application back what middleware has read of a request."""

from collections import deque

from starlette.types import Message, Receive


def replay(messages: deque[Message], receive: Receive) -> Receive:
    """An ASGI receive: `messages`, each dropped as it is handed over, then what `receive` says."""

    async def replayed() -> Message:
        return messages.popleft() if messages else await receive()

    return replayed
