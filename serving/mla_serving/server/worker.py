# SPDX-License-Identifier: Apache-2.0
"""One of several HTTP processes: its part of the start-up, serving, and its end."""

import asyncio
import logging
import multiprocessing
import os
import signal
import socket
import sys
import threading
from argparse import Namespace
from collections.abc import MutableSequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

from mla_backend.refusals import described, note_first
from mla_serving.server import environment, lifecycle
from mla_serving.server.accept import NOT_ACCEPTING, SharingServer
from mla_serving.server.progress import any_letter
from mla_serving.server.shared_gate import SharedGate

# How far a process is: it has its client of the engines; a first answer is computed, if this is
# the process that does so; it takes connections, for which all wait until all are WARM.
LOADED, WARM, LISTENING = 1, 2, 3
# Its exit status when it found the engine dead.
ENGINE_DIED = 3
_POLL_SECONDS = 0.02


class Shared:
    """What the HTTP processes share with each other and with the one that started them.

    gate: counts the requests of all.
    steps: how far each process is.
    loads: open connections of each.
    listen: set when all may take connections.
    said: what the first process has to tell: once it is LOADED what the engine can be asked for,
        and once it is WARM the refusal of a first answer, or None.
    """

    def __init__(self, limit: int, processes: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.gate = SharedGate(limit)
        self.steps: MutableSequence[int] = context.RawArray("b", processes)
        self.loads: MutableSequence[int] = context.RawArray("i", [NOT_ACCEPTING] * processes)
        self.listen = context.RawValue("b", 0)
        self.said = context.SimpleQueue()


def main(
    shared: Shared,
    others: list[int],
    address: str,
    sock: socket.socket,
    args: Namespace,
    client: dict[str, Any],
) -> None:
    """The process that vLLM's launcher starts.

    Args:
        shared: with the other processes.
        others: ids of the engines' processes, which end with this one should their parent be
            killed.
        address: of the socket, in words.
        sock: bound; all HTTP processes have it.
        args: the settings.
        client: which client of the engines this is, and their addresses.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    # Ctrl-C, and the end of a terminal, go to the whole group: the parent acts on them for all.
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    _end_with_parent(others)
    logging.raiseExceptions = False  # nobody may read what is printed any more
    any_letter()
    try:
        from mla_serving.server import vllm_api

        name = vllm_api.name_process(client["client_index"])
        vllm_api.prepare(args)
        import uvloop  # comes with vLLM

        status = uvloop.run(_serve(shared, name, sock, args, client))
    except Exception as error:
        if environment.debugging():
            raise
        note_first(described(error))
        status = 1
    sys.exit(status)


def _end_with_parent(others: list[int]) -> None:
    """Should the parent be killed, end `others` and this process."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        lifecycle.kill(others)
        os._exit(128 + signal.SIGKILL)

    threading.Thread(target=wait, daemon=True, name="parent").start()


async def _serve(
    shared: Shared, name: str, sock: socket.socket, args: Namespace, client: dict[str, Any]
) -> int:
    from mla_serving.server import http, vllm_api
    from mla_serving.server.assembly import assemble

    index = client["client_index"]

    def reached(step: int) -> None:
        shared.steps[index] = step

    async with AsyncExitStack() as stack:
        built = vllm_api.build_async_engine_client(args, client_config=client)
        engine = await stack.enter_async_context(built)
        ours = await assemble(stack, engine, shared.gate, args)
        make = partial(SharingServer, loads=shared.loads, index=index)
        server = http.make_server(ours.app, args, partial(reached, LISTENING), make, name)
        ours.vllm_app.state.server = server
        if index == 0:
            shared.said.put(ours.tasks)
        reached(LOADED)
        if index == 0:
            warms = "generate" in ours.tasks and not args.mla_no_warmup
            shared.said.put(await ours.first_answers() if warms else None)
        reached(WARM)
        while not shared.listen.value:
            await asyncio.sleep(_POLL_SECONDS)
        return await _until_told(server, sock, engine)


async def _until_told(server: lifecycle.Server, sock: socket.socket, engine: Any) -> int:
    """Serve until the parent says to stop, by SIGTERM: it has closed the gate and waited."""
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    serving = asyncio.create_task(server.serve(sockets=[sock]))
    stopping = asyncio.create_task(stop.wait())
    dying = asyncio.create_task(lifecycle.engine_death(engine))
    await asyncio.wait({serving, stopping, dying}, return_when=asyncio.FIRST_COMPLETED)
    died = engine.errored
    stopping.cancel()
    dying.cancel()
    server.should_exit = True
    await serving
    return 0 if stop.is_set() else ENGINE_DIED if died else 1
