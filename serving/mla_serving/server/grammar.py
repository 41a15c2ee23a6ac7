# SPDX-License-Identifier: Apache-2.0
"""400 for a grammar that the engine gives up: vLLM checks that it can be read, not that it has a
next token, and answers 500 when there is none (or the engine's compiler takes less than the check).

The engine ends such a request with the reason "error" and does not say why; that there was a
grammar is in its sampling parameters, whatever field or tool asked for it. It ends in the same way
what a KV connector cannot load, and requests whose images are no longer in its caches: those, with
a grammar too, keep vLLM's answer. Of NaN logits a GPU may sample a token that the grammar rejects;
the engine counts them only if asked to, for its metrics alone, so the text names them too.
"""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mla_serving.server.errors import error_event, error_response, is_event_stream

_TEXT = (
    "No text can be made by the grammar that the request asks for (response_format, "
    "structured_outputs, or the parameters of its tools): the engine cannot compile it, nothing "
    "satisfies it, or allowed_token_ids, logit_bias or bad_words leave none of its tokens. "
    "(A model whose logits are NaN, which is no fault of the request, may look the same.)"
)
# How an error begins in a stream: of chat and completions, of messages.
_EVENT_ERRORS = (b'data: {"error"', b"event: error\n")


@dataclass
class _Answer:
    """What happened to the grammars of the request that is being answered."""

    given_up: bool = False


_answer: ContextVar[_Answer | None] = ContextVar("answer", default=None)


def note_given_up(engine: Any) -> None:
    """Have `engine`, vLLM's client, tell `Grammar` which requests ended with an error that can only
    be that of their grammar; others take the way they took."""
    # Not that of the options: --kv-offloading-size makes one too.
    if engine.vllm_config.kv_transfer_config is not None:
        return
    generate = engine.generate

    def noting(prompt: Any, sampling_params: Any, *args: Any, **kwargs: Any) -> Any:
        outputs = generate(prompt, sampling_params, *args, **kwargs)
        answer = _answer.get()
        if answer is None or sampling_params.structured_outputs is None or _has_media(prompt):
            return outputs
        return _noted(outputs, answer)

    engine.generate = noting


def _has_media(prompt: Any) -> bool:
    return isinstance(prompt, dict) and prompt.get("type") == "multimodal"


async def _noted(outputs: AsyncGenerator[Any, None], answer: _Answer) -> AsyncGenerator[Any, None]:
    async with aclosing(outputs):  # who leaves aborts the request at once, as without this
        async for output in outputs:
            if any(one.finish_reason == "error" for one in output.outputs):
                answer.given_up = True
            yield output


class Grammar:
    """ASGI middleware, of an application whose engine went through `note_given_up`."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        answer = _Answer()
        _answer.set(answer)
        streams = refused = False

        async def send_checked(message: Message) -> None:
            nonlocal streams, refused
            if refused:  # the rest of what was replaced
                return
            if message["type"] == "http.response.start":
                if answer.given_up and message["status"] == 500:
                    refused = True
                    return await error_response(400, _TEXT)(scope, receive, send)
                streams = is_event_stream(message)
            elif answer.given_up and message.get("body", b"").startswith(_EVENT_ERRORS):
                named = message["body"].startswith(b"event:")
                message = {**message, "body": error_event(400, _TEXT, named)}
            await send(message)

        try:
            await self.app(scope, receive, send_checked)
        except Exception:
            if not (answer.given_up and streams):
                raise
            # vLLM's streamed responses have no event for it, and break off.
            await send({"type": "http.response.body", "body": error_event(400, _TEXT, named=True)})
