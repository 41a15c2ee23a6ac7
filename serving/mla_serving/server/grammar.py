# SPDX-License-Identifier: Apache-2.0
"""400 for a grammar that the engine gives up: vLLM checks that it can be read, not that it has a
next token, and answers 500 when there is none (or the engine's compiler takes less than the check).
"""

import re

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mla_serving.server.errors import error_response
from mla_serving.server.json_object import is_json

# What asks for a grammar: of chat and completions, of responses (in "text"), a tool that must be
# called.
_ASKS = re.compile(
    rb'"(?:structured_outputs|response_format|format)"\s*:'
    rb'|"tool_choice"\s*:(?!\s*(?:"auto"|"none"|null))'
)
# vLLM's one answer to a request that its engine ended with an error.
_GIVEN_UP = b'"Internal server error"'
_TEXT = (
    "No text can be made by the grammar that the request asks for (response_format, "
    "structured_outputs, or the parameters of its tools): the engine cannot compile it, nothing "
    "satisfies it, or allowed_token_ids, logit_bias or bad_words leave none of its tokens."
)


class Grammar:
    """ASGI middleware. Only for engines without a KV connector, whose failed loads vLLM answers
    with the same words."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not is_json(Headers(scope=scope)):
            return await self.app(scope, receive, send)
        body: list[bytes] = []
        held: Message | None = None

        async def receive_noted() -> Message:
            message = await receive()
            body.append(message.get("body", b""))
            return message

        async def send_checked(message: Message) -> None:
            nonlocal held
            if message["type"] == "http.response.start":
                if message["status"] == 500:
                    held = message
                    return
                body.clear()
            elif held is not None:
                start, held = held, None
                if _GIVEN_UP in message.get("body", b"") and _ASKS.search(b"".join(body)):
                    return await error_response(400, _TEXT)(scope, receive, send)
                await send(start)
            await send(message)

        await self.app(scope, receive_noted, send_checked)
