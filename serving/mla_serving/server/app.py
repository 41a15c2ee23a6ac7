# SPDX-License-Identifier: Apache-2.0
"""The root application: our routes and middleware, vLLM's application mounted below them."""

from argparse import Namespace
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from http import HTTPMethod
from typing import Any

from fastapi import FastAPI, Request, WebSocket
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse, Response

from mla_serving.server import users_middleware
from mla_serving.server.admission import Admission, AnyGate
from mla_serving.server.auth import ApiKey
from mla_serving.server.body_limit import BodyLimit
from mla_serving.server.body_wait import BodyWait
from mla_serving.server.cut_short import CutShort
from mla_serving.server.errors import OpenAIErrors, error_response
from mla_serving.server.grammar import Grammar, note_given_up
from mla_serving.server.info import Info
from mla_serving.server.json_object import JsonObject
from mla_serving.server.json_values import JsonValues
from mla_serving.server.metrics import Counted
from mla_serving.server.named_logprobs import refuse_named_logprobs
from mla_serving.server.request_id import RequestId
from mla_serving.server.watchdog import Watchdog, is_retired

MIB = 1024 * 1024
_READ = ["GET", "HEAD"]
_OTHERS = [method.value for method in HTTPMethod if method.value not in _READ]


def build_root_app(
    vllm_app: FastAPI,
    engine: Any,
    gate: AnyGate,
    info: Info,
    watchdog: Watchdog,
    args: Namespace,
    keys: list[str],
) -> FastAPI:
    """Our application around `vllm_app`.

    Args:
        vllm_app: what vLLM's `build_app` made, without --middleware; its lifespan is run with ours.
        engine: vLLM's engine client; `errored` and `vllm_config` are read, and what `generate` says
            of grammars; some requests do not reach `generate` (named_logprobs.py).
        gate: counts and admits requests; the drain closes it.
        info: answers /mla/info.
        watchdog: knows whether the engine hangs.
        args: root_path, middleware, mla_max_body_mib, mla_open_metrics, enable_request_id_headers
            and vLLM's options of CORS.
        keys: API keys; empty leaves the server open.
    """
    app = FastAPI(
        title="mla-backend", root_path=args.root_path or "", openapi_url=None, docs_url=None
    )

    async def health() -> Response:
        if engine.errored and not is_retired(engine):
            return error_response(503, "The engine has died.")
        if gate.draining:
            return error_response(503, "The server is shutting down.")
        if complaint := watchdog.complaint():
            return error_response(503, complaint)
        return Response(status_code=200)

    async def mla_info() -> JSONResponse:
        return JSONResponse(await info.read())

    _read_only(app, "/health", health)
    _read_only(app, "/mla/info", mla_info)
    app.add_api_websocket_route("/metrics{rest:path}", _no_websocket)  # vLLM's fails at one
    app.mount("/", vllm_app)  # last: our routes win
    # A mounted application's lifespan is not run by its parent.
    app.router.lifespan_context = lambda _: _lifespan(vllm_app)  # type: ignore[assignment]

    # The last one added is the outermost. Users' are around all routes, ours too, and behind the
    # limits: they may read a body.
    app.state = vllm_app.state  # which they find by the request
    users_middleware.add(app, args.middleware)
    note_given_up(engine)
    refuse_named_logprobs(engine)
    app.add_middleware(Grammar)
    app.add_middleware(JsonValues)
    app.add_middleware(JsonObject)
    app.add_middleware(BodyLimit, limit=int(args.mla_max_body_mib * MIB))
    app.add_middleware(BodyWait)
    app.add_middleware(CutShort, gate=gate)
    app.add_middleware(Admission, gate=gate)
    if keys:
        open_paths = ["/health", *(["/metrics"] if args.mla_open_metrics else [])]
        app.add_middleware(ApiKey, keys=keys, open_paths=open_paths)
    # As vLLM's own, which is behind ours: a browser then reads our refusals too, and what it asks
    # ahead, without credentials, needs no key.
    app.add_middleware(
        CORSMiddleware,
        allow_origins=args.allowed_origins,
        allow_credentials=args.allow_credentials,
        allow_methods=args.allowed_methods,
        allow_headers=args.allowed_headers,
    )
    app.add_middleware(OpenAIErrors, vllm_app=vllm_app)
    if args.enable_request_id_headers:
        app.add_middleware(RequestId)
    app.add_middleware(Counted)
    return app


@asynccontextmanager
async def _lifespan(vllm_app: FastAPI) -> AsyncIterator[Any]:
    """vLLM's, which takes `state` away at its end. Requests that the drain cuts short end later,
    and what listens for their clients to leave reads it."""
    state = vllm_app.state
    async with vllm_app.router.lifespan_context(vllm_app) as given:
        yield given
    vllm_app.state = state


async def _no_websocket(websocket: WebSocket) -> None:
    await websocket.close(1008)


def _read_only(app: FastAPI, path: str, answer: Callable[[], Awaitable[Response]]) -> None:
    """`answer` to GET and HEAD, 405 to the rest: a route lets other methods pass, here to vLLM's
    application, which knows no such route (404) or names the methods of its own."""

    async def refuse(request: Request) -> Response:
        text = f"{request.method} is not allowed at {path}: {' and '.join(_READ)} are."
        return error_response(405, text, {"Allow": ", ".join(_READ)})

    app.add_api_route(path, answer, methods=_READ)
    app.add_api_route(path, refuse, methods=_OTHERS)
