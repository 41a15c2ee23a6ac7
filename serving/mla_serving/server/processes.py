# SPDX-License-Identifier: Apache-2.0
"""A server of several HTTP processes, seen from the one that starts, watches and ends them."""

import asyncio
import gc
import multiprocessing
import signal
import socket
import threading
import time
from argparse import Namespace
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from multiprocessing.process import BaseProcess
from typing import Any

from mla_serving.server import lifecycle, vllm_api
from mla_serving.server.progress import Progress
from mla_serving.server.worker import ENGINE_DIED, LISTENING, LOADED, WARM, Shared, main

_POLL_SECONDS = 0.05
# What is cut short at the end of the drain has a second, and the engines are to hear of it. With
# the engines' own time all is over in 15.
_STOP_SECONDS = 5.0


class Engines:
    """All engines of this machine, in the place that `lifecycle` has for their client."""

    def __init__(self, manager: Any, coordinator: Any, vllm_config: Any) -> None:
        self._manager, self._coordinator = manager, coordinator
        self.vllm_config = vllm_config
        self.errored = False
        if manager is not None:  # None: all engines run elsewhere
            threading.Thread(target=self._watch, daemon=True, name="engines").start()

    def _watch(self) -> None:
        self._manager.monitor_engine_liveness()  # returns when one has ended
        self.errored = True

    def shutdown(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        if self._manager is not None:
            self._manager.shutdown(timeout=timeout)
        if self._coordinator is not None:
            self._coordinator.shutdown(timeout=max(0.0, deadline - time.monotonic()))


class Workers:
    """The HTTP processes, in the place that `lifecycle` has for uvicorn's server.

    Args:
        processes: theirs, started.
        coordinator: vLLM's, of data-parallel engines, if there is one: it must run as well.
        engines: theirs.
        shared: with the processes.
        progress: where to say that one has ended.
        on_listening: called when all of them do.

    `failed` says whether one has ended by itself.
    """

    def __init__(
        self,
        processes: list[BaseProcess],
        coordinator: Any,
        engines: Engines,
        shared: Shared,
        progress: Progress,
        on_listening: Callable[[], None],
    ) -> None:
        self._processes = processes
        self._watched = [*processes, *([coordinator.proc] if coordinator else [])]
        self._engines = engines
        self._shared = shared
        self._progress = progress
        self._on_listening = on_listening
        self.should_exit = False
        self.failed = False

    def wait_for(self, step: int) -> None:
        """Until all have reached `step` of their start; RuntimeError as of `_have_reached`."""
        while not self._have_reached(step):
            time.sleep(_POLL_SECONDS)

    async def serve(self, sockets: list[socket.socket]) -> None:
        """Let them listen until `should_exit` is set, or one of them, or an engine, has ended by
        itself; then end them all. An engine's end, of which one of them may hear first, is no
        failure of theirs."""
        self._shared.listen.value = 1
        while not (self.should_exit or self._have_reached(LISTENING)):
            await asyncio.sleep(_POLL_SECONDS)
        if not self.should_exit:
            self._on_listening()
        while not (self.should_exit or self._engines.errored or self.failed):
            if ended := self._ended():
                self._progress.line(ended)
                self.failed = True
            await asyncio.sleep(_POLL_SECONDS)
        self._shared.gate.draining = True  # what is cut short is a 503, with a time to come back
        for process in self._processes:
            process.terminate()
        deadline = time.monotonic() + _STOP_SECONDS
        while any(process.exitcode is None for process in self._processes):
            if time.monotonic() > deadline:
                lifecycle.kill(process.pid for process in self._processes if process.pid)
            await asyncio.sleep(_POLL_SECONDS)

    def _have_reached(self, step: int) -> bool:
        """Whether all have; RuntimeError when one of them, or an engine, has ended instead."""
        if min(self._shared.steps) >= step:
            return True
        if ended := self._ended():
            raise RuntimeError(ended)
        if self._engines.errored:
            raise RuntimeError("an engine has died")
        return False

    def _ended(self) -> str:
        """Words for one that has ended; "" while all run, and where it ended with the engine."""
        for process in self._watched:
            if process.exitcode == ENGINE_DIED and process in self._processes:
                self._engines.errored = True
            elif process.exitcode is not None:
                return f"the process {process.name} ({process.pid}) {_how(process.exitcode)}"
        return ""


def _how(status: int) -> str:
    if status >= 0:
        return f"has ended with status {status}"
    return f"was ended by {signal.Signals(-status).name}"


def serve(
    args: Namespace,
    sock: socket.socket,
    progress: Progress,
    say_ready: Callable[[str, tuple[str, ...]], None],
) -> int:
    """Serve with `args.api_server_count` processes until a signal; returns the exit status.

    Args:
        args: the settings.
        sock: bound; closed here once the processes have it.
        progress: where to say what happens.
        say_ready: says so, by the model's name and what the engine can be asked for.
    """
    import uvloop  # comes with vLLM

    shared = Shared(args.mla_max_requests, args.api_server_count)
    status = 1
    with ExitStack() as stack:
        stack.callback(lambda: vllm_api.end(multiprocessing.active_children(), _STOP_SECONDS))
        what = f"loading {args.model} into vLLM {vllm_api.VLLM_VERSION}"
        loading = stack.enter_context(ExitStack())
        loading.enter_context(
            progress.waiting(f"{what}, with {args.api_server_count} HTTP processes")
        )

        def supervise(config: Any, processes: list[BaseProcess], manager: Any, of_dp: Any) -> None:
            nonlocal status
            engines = Engines(manager, of_dp, config)

            def listening() -> None:
                say_ready((args.served_model_name or [args.model])[0], tasks)

            workers = Workers(processes, of_dp, engines, shared, progress, listening)
            workers.wait_for(LOADED)
            loading.close()
            tasks = shared.said.get()
            with ExitStack() as warming:
                if "generate" in tasks and not args.mla_no_warmup:
                    warming.enter_context(progress.waiting("computing a first answer"))
                workers.wait_for(WARM)
            if (refusal := shared.said.get()) is not None:
                progress.line(f"no first answer, so a user's may be slow: {refusal}")
            gc.freeze()  # as vLLM's application does: or the end takes seconds
            status = uvloop.run(
                lifecycle.run_until_stopped(
                    workers, sock, engines, shared.gate, args.mla_drain_timeout, progress
                )
            ) or int(workers.failed)

        vllm_api.run_api_servers(args, sock, partial(main, shared), supervise)
    return status
