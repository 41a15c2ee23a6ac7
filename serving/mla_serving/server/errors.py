# SPDX-License-Identifier: Apache-2.0
"""Every error answer in the shape of the OpenAI API: {"error": {message, type, param, code}}."""

import json
import logging
from http import HTTPStatus
from typing import Any

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mla_serving.server.late_error import cause_of, late_refusal
from mla_serving.server.paths import route_path

_LOG = logging.getLogger("uvicorn.error")  # which would log it otherwise
# What an error body may weigh before it is passed on as it is: ours and vLLM's are far smaller.
_LONGEST_REWRITE = 64 * 1024
# Routes whose events have names, by which clients of messages look.
_NAMED = ("/v1/messages", "/v1/responses")
# How Python's json says of an answer that it holds NaN, which vLLM passes on as 400.
_NOT_FINITE = "Out of range float values are not JSON compliant"
_NAN = (
    "What the model computed (logprobs, embeddings, scores) is NaN, or infinite: a fault of its "
    "weights or of the server."
)


def error_type(status: int) -> str:
    """vLLM's name for an HTTP status: 404 -> "NotFoundError"."""
    name = HTTPStatus(status).phrase.title().replace(" ", "").replace("-", "")
    return name if name.endswith("Error") else f"{name}Error"


def error_body(status: int, message: str, param: str | None = None) -> dict[str, Any]:
    """The JSON body of an error answer."""
    error = {"message": message, "type": error_type(status), "param": param, "code": status}
    return {"error": error}


def error_response(
    status: int,
    message: str,
    headers: dict[str, str] | None = None,
    param: str | None = None,
) -> JSONResponse:
    """An error answer, ready to be sent. param: the field of the request that it is about."""
    return JSONResponse(error_body(status, message, param), status, headers)


def error_event(status: int, message: str, named: bool, param: str | None = None) -> bytes:
    """An error as an event of a stream that has begun. named: its events have names, as those of
    responses and messages have; OpenAI's client raises the `error` of these too."""
    error = error_body(status, message, param)
    if not named:
        return f"data: {json.dumps(error)}\n\n".encode()
    return f"event: error\ndata: {json.dumps({'type': 'error', **error})}\n\n".encode()


def is_event_stream(start: Message) -> bool:
    """Whether an answer that starts so is one of events."""
    return Headers(raw=start["headers"]).get("content-type", "").startswith("text/event-stream")


def has_named_events(scope: Scope, last: Message) -> bool:
    """Whether the events of a stream have names, by the `last` message or, before any event, by
    the route."""
    if event := last.get("body"):
        return bool(event.startswith(b"event:"))
    return route_path(scope).startswith(_NAMED)


def reshaped(status: int, body: bytes) -> bytes | None:
    """`body` in OpenAI's shape with a message, or None where it is so already."""
    try:
        content = json.loads(body)
    except ValueError:
        content = body.decode(errors="replace")
    if isinstance(content, dict):
        if isinstance(error := content.get("error"), dict):
            if error.get("message"):
                return None
            # vLLM's, of an exception without words.
            content["error"] = error | {"message": HTTPStatus(status).phrase}
            return json.dumps(content).encode()
        # FastAPI says `detail`; vLLM's own 401 is {"error": "Unauthorized"}.
        content = content.get("detail") or content.get("error") or content.get("message") or ""
    message = content if isinstance(content, str) else json.dumps(content)
    return json.dumps(error_body(status, message.strip() or HTTPStatus(status).phrase)).encode()


def _holds_nan(body: bytes) -> bool:
    """Whether `body`, of an error, says that what was to be answered is not finite."""
    try:
        message = json.loads(body)["error"]["message"]
    except (ValueError, TypeError, KeyError):
        return False
    return isinstance(message, str) and message.startswith(_NOT_FINITE)


class OpenAIErrors:
    """ASGI middleware: gives any error answer (status >= 400) of the application our one shape, and
    500 where it raises before an answer, or answers 400 for NaN of its own. A stream of events amid
    which it raises ends with one that says why: vLLM checks some fields of a response as late as
    that. `vllm_app` knows the words."""

    def __init__(self, app: ASGIApp, vllm_app: Starlette) -> None:
        self.app = app
        self.vllm_app = vllm_app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        held: Message | None = None
        body = b""
        last: Message = {}  # of those passed on
        streams = False

        async def send_on(message: Message) -> None:
            nonlocal last, streams
            last = message
            if message["type"] == "http.response.start":
                streams = is_event_stream(message)
            await send(message)

        async def send_shaped(message: Message) -> None:
            nonlocal held, body
            if message["type"] == "http.response.start" and _is_plain_error(message):
                held = message
                return
            if held is None or message["type"] != "http.response.body":
                return await send_on(message)
            body += message.get("body", b"")
            if message.get("more_body") and len(body) <= _LONGEST_REWRITE:
                return
            start, held = held, None
            if start["status"] == 400 and _holds_nan(body):
                start = {**start, "status": 500}
                body = json.dumps({"detail": _NAN}).encode()
            new = None if len(body) > _LONGEST_REWRITE else reshaped(start["status"], body)
            if new is not None:
                kept = [h for h in start["headers"] if h[0].lower() not in _REPLACED]
                own = [
                    (b"content-type", b"application/json"),
                    (b"content-length", b"%d" % len(new)),
                ]
                start = {**start, "headers": kept + own}
            await send_on(start)
            await send_on({**message, "body": body if new is None else new})

        try:
            await self.app(scope, receive, send_shaped)
        except Exception as error:
            # Starlette answers a crash and raises it again; uvicorn then closes the connection
            # under what the client, which was told nothing, has sent or sends next.
            text = f"Internal error: {type(cause_of(error)).__name__}"
            if last and (last["type"] == "http.response.start" or last.get("more_body")):
                if streams:
                    named = has_named_events(scope, last)
                    refusal = await late_refusal(self.vllm_app, error, scope)
                    if refusal is not None and not _holds_nan(refusal.body):
                        return await send(_last_event(refusal, named))
                    event = error_event(500, text, named)
                    await send({"type": "http.response.body", "body": event, "more_body": True})
                raise  # the client must see that the answer was cut off
            _LOG.exception("Exception in ASGI application")
            if not last:
                await error_response(500, text)(scope, receive, send)


def _last_event(refusal: Response, named: bool) -> Message:
    status, body = refusal.status_code, bytes(refusal.body)
    error = json.loads(reshaped(status, body) or body)["error"]
    event = error_event(status, error["message"], named, error.get("param"))
    return {"type": "http.response.body", "body": event}


_REPLACED = (b"content-type", b"content-length")


def _is_plain_error(start: Message) -> bool:
    packed = "content-encoding" in Headers(raw=start["headers"])
    return start["status"] >= 400 and not is_event_stream(start) and not packed
