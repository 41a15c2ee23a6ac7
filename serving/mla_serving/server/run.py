# SPDX-License-Identifier: Apache-2.0
"""The start-up, step by step, with a line for each."""

import json
import os
import shlex
import socket
import sys
from argparse import Namespace
from collections.abc import Callable, Collection
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

from pydantic import ValidationError

from mla_backend.refusals import described, heard, place
from mla_serving import hub
from mla_serving.server import environment, lifecycle
from mla_serving.server.admission import Gate
from mla_serving.server.progress import Progress, say
from mla_serving.server.settings import read_settings


def serve(argv: list[str] | None) -> int:
    """See `mla_serving.server.main`."""
    with heard() as refused:
        return _start(argv, refused)


def _start(argv: list[str] | None, refused: Callable[[], str]) -> int:
    progress = Progress()
    lifecycle.catch_signals_while_starting()
    sock: socket.socket | None = None
    try:
        settings = read_settings(sys.argv[1:] if argv is None else argv, os.environ)
        local = settings.is_local()
        if not local and (why := hub.unreachable(settings.model(), os.environ)):
            progress.line(f"{why}: models are looked for in the Hub's cache alone")
            local = True
        environment.set_before_import(local)
        with progress.waiting("importing vLLM"):
            from mla_serving.server import args as server_args
            from mla_serving.server import http, vllm_api
        args = server_args.parse(settings)
        vllm_api.prepare(args)
        sock = http.bind(args)
        if (args.api_server_count or 1) > 1:
            from mla_serving.server import processes

            return processes.serve(args, sock, progress, partial(_say_ready, args, progress))
        import uvloop  # comes with vLLM

        return int(uvloop.run(_serve(args, sock, progress)))
    except lifecycle.StopRequested:
        progress.line("stopped before it was ready")
        return 0
    except Exception as error:
        if environment.debugging():
            raise
        said = _what(error)
        print(f"mla-backend serve: {said}", file=sys.stderr)
        # Beside the error, which may be another than what a worker once refused.
        if (words := refused()) and words not in said:
            print(f"mla-backend serve: {words}", file=sys.stderr)
        return 1
    finally:
        if sock is not None:
            http.unbind(sock, args)


def _what(error: Exception) -> str:
    """What went wrong, without pydantic's frame of types and links around a refusal of vLLM's; of
    what no one put into words, where."""
    if isinstance(error, ImportError) and error.name:  # none: an option lacks a package
        return f"{error}; `mla-backend doctor` says how to mend it"
    if place(error):
        return f"{described(error)}; VLLM_LOGGING_LEVEL=DEBUG shows the way there"
    if not isinstance(error, ValidationError):
        return str(error) or type(error).__name__
    said = []
    for one in error.errors(include_url=False):
        where = ".".join(map(str, one["loc"]))
        said.append(f"{where}: {one['msg']}" if where else one["msg"].removeprefix("Value error, "))
    return "; ".join(said)


async def _serve(args: Namespace, sock: socket.socket, progress: Progress) -> int:
    from mla_serving.server import http, vllm_api
    from mla_serving.server.assembly import assemble

    async with AsyncExitStack() as stack:
        with progress.waiting(f"loading {args.model} into vLLM {vllm_api.VLLM_VERSION}"):
            client = vllm_api.build_async_engine_client(args)
            engine = await stack.enter_async_context(client)
        gate = Gate(args.mla_max_requests)
        ours = await assemble(stack, engine, gate, args)
        server = http.make_server(
            ours.app, args, lambda: _say_ready(args, progress, ours.name, ours.tasks)
        )
        # vLLM's handlers stop it when they find the engine dead.
        ours.vllm_app.state.server = server
        if "generate" in ours.tasks and not args.mla_no_warmup:
            with progress.waiting("computing a first answer"):
                refusal = await ours.first_answers()
            if refusal is not None:
                progress.line(f"no first answer, so a user's may be slow: {refusal}")
        return await lifecycle.run_until_stopped(
            server, sock, engine, gate, args.mla_drain_timeout, progress
        )


def _say_ready(args: Namespace, progress: Progress, model: str, tasks: Collection[str]) -> None:
    from mla_serving.server import http, vllm_api

    progress.line(f"ready: {model} at {http.url(args)}/v1")
    if line := example(http.curl(args), model, bool(vllm_api.api_keys(args)), tasks):
        say(f"  {line}")


def example(curl: str, model: str, with_key: bool, tasks: Collection[str]) -> str | None:
    """A request to try; `curl` is the command up to the address. None for an engine that neither
    writes nor embeds text."""
    asked: dict[str, Any]
    if "generate" in tasks:
        route, asked = "chat/completions", {"messages": [{"role": "user", "content": "Hello"}]}
    elif "embed" in tasks:
        route, asked = "embeddings", {"input": "Hello"}
    else:
        return None
    key = " -H 'Authorization: Bearer YOUR_KEY'" if with_key else ""
    content = "-H 'Content-Type: application/json'"
    body = shlex.quote(json.dumps({"model": model, **asked}))
    return f"{curl}/v1/{route}{key} {content} -d {body}"
