# SPDX-License-Identifier: Apache-2.0
r"""Refuse JSON with half of a surrogate pair, such as "\ud800": no Unicode text, so that it can be
neither tokenised nor sent on. vLLM answers it with 500, or with words on its own code.
"""

import json
import re
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mla_serving.server.errors import error_response
from mla_serving.server.json_object import is_json

# What may become one: an escape of a half (whole pairs too), its bytes, or a zero byte, as in
# UTF-16: Python's parser takes all of them. A body without any is not parsed here.
_SUSPECT = re.compile(rb"\\u[dD][89a-fA-F]|\xed[\xa0-\xbf]|\x00")
_HALF = re.compile("[\ud800-\udfff]")
_LONGEST_PATH = 200  # of the field's name in an answer


class UnicodeText:
    """ASGI middleware: 400 for application/json with a string that is no Unicode text."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not is_json(Headers(scope=scope)):
            return await self.app(scope, receive, send)
        messages = [await receive()]
        while messages[-1].get("more_body"):
            messages.append(await receive())
        body = b"".join(message.get("body", b"") for message in messages)
        if (found := lone_surrogate(body)) is not None:
            path, half = found
            text = (
                f"{path or 'The body'} has a lone surrogate, {half}: half of a pair, which is no "
                "character. Send both halves, or leave it out."
            )
            return await error_response(400, text, param=path or None)(scope, receive, send)

        async def replay() -> Message:
            return messages.pop(0) if messages else await receive()

        await self.app(scope, replay, send)


def lone_surrogate(body: bytes) -> tuple[str, str] | None:
    """The place of a lone surrogate in JSON ("messages[0].content"; "" for a name at the top) and
    its escape; None without one, and for what is no JSON."""
    if not _SUSPECT.search(body):
        return None
    try:
        content = json.loads(body)
    except (ValueError, RecursionError):  # vLLM's to refuse
        return None
    left: list[tuple[str, Any]] = [("", content)]
    while left:
        path, value = left.pop()
        if isinstance(value, str) and (half := _HALF.search(value)):
            return _ascii(path)[:_LONGEST_PATH], _ascii(half[0])
        if isinstance(value, list):
            left += [(f"{path}[{i}]", item) for i, item in enumerate(value)]
        if isinstance(value, dict):
            left += [(path, name) for name in value]
            left += [(f"{path}.{name}".lstrip("."), item) for name, item in value.items()]
    return None


def _ascii(text: str) -> str:
    return text.encode("ascii", "backslashreplace").decode()
