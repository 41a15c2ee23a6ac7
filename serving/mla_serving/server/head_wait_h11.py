# SPDX-License-Identifier: Apache-2.0
"""The wait for a request's head where httptools is missing.

This one parses no request before it has answered the one in front, and reads none: of a client that
has sent its next request and leaves it hears when it writes, not before (pipelining.py).
"""

from uvicorn.protocols.http.h11_impl import H11Protocol

from mla_serving.server.head_wait import HeadWait


class H11Wait(HeadWait, H11Protocol):  # type: ignore[misc]
    """uvicorn's other HTTP protocol."""
