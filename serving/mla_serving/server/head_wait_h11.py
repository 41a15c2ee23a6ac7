# SPDX-License-Identifier: Apache-2.0
"""The wait for a request's head where httptools is missing."""

from uvicorn.protocols.http.h11_impl import H11Protocol

from mla_serving.server.head_wait import HeadWait


class H11Wait(HeadWait, H11Protocol):  # type: ignore[misc]
    """uvicorn's other HTTP protocol."""
