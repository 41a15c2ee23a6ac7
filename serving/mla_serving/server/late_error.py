# SPDX-License-Identifier: Apache-2.0
"""What an application would have answered to an exception, had its answer not begun."""

from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.types import Scope

# How Starlette begins what it raises of an exception that the application has an answer to.
_TOO_LATE = "Caught handled exception"
# What vLLM raises of a request that is at fault; the latter is its base to 0.26.
_CLIENTS = {"VLLMClientError", "ValueError"}


def cause_of(error: Exception) -> BaseException:
    """What was raised where Starlette raises `error`."""
    if error.__cause__ is not None and str(error).startswith(_TOO_LATE):
        return error.__cause__
    return error


async def late_refusal(application: Starlette, error: Exception, scope: Scope) -> Any | None:
    """The answer (a starlette Response) of `application` if `error` is the client's fault."""
    cause = cause_of(error)
    kinds = type(cause).__mro__
    if cause is error or _CLIENTS.isdisjoint(kind.__name__ for kind in kinds):
        return None
    handlers = application.exception_handlers
    handler: Any = next(handlers[kind] for kind in kinds if kind in handlers)
    return await handler(Request({**scope, "app": application}), cause)
