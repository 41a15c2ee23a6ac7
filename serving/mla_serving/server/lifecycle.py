# SPDX-License-Identifier: Apache-2.0
"""Signals, and the way from "serving" to "stopped": drain, then exit."""

import asyncio
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing import resource_tracker
from typing import Any, Protocol

import psutil
import uvicorn

from mla_serving.server.admission import AnyGate
from mla_serving.server.progress import Progress
from mla_serving.server.watchdog import is_retired

# What a terminal sends when it goes, unless nohup has it ignored.
_HANG_UP = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN else set()
_SIGNALS = (signal.SIGINT, signal.SIGTERM, *_HANG_UP)
_told = threading.Event()  # by a first signal
_ENGINE_CHECK_SECONDS = 1.0
# After the drain: what still runs is cancelled, which aborts it in the engine.
_CANCEL_SECONDS = 1
# A start that is told to stop gets this long: the exception may have come where it is swallowed,
# such as a destructor, and vLLM waits ten minutes for an engine that the same signal ended.
_START_STOP_SECONDS = 30.0
# vLLM's own default kills its processes at once, and leaks their shared memory.
_ENGINE_STOP_SECONDS = 10.0


class StopRequested(SystemExit):
    """A signal came before the server was up.

    No KeyboardInterrupt: vLLM swallows that where it waits for its engine (zmq_socket_ctx).
    """


def catch_signals_while_starting() -> None:
    """From here on SIGINT, SIGTERM and SIGHUP raise StopRequested in the main thread, and end the
    process and its children if that has not done it soon, or with a second SIGINT or SIGTERM.

    SIGINT and SIGHUP stay blocked in this thread and so in all threads and processes started later:
    Ctrl-C, or the end of a terminal, goes to the whole process group, and vLLM's workers would die
    of it in the middle of a drain. One thread waits for them and passes them to this process alone,
    as SIGTERM. Call it first.
    """
    held = {signal.SIGINT, *_HANG_UP}
    signal.pthread_sigmask(signal.SIG_BLOCK, held)  # for the resource tracker, too
    resource_tracker.ensure_running()  # unblocks SIGINT in this thread
    signal.pthread_sigmask(signal.SIG_BLOCK, held)

    def forward() -> None:
        awaited = set(held)
        while True:
            number = signal.sigwait(awaited)
            # A terminal that goes says so more than once, and is no second signal.
            awaited.discard(signal.SIGHUP)
            if number != signal.SIGHUP or not _told.is_set():
                os.kill(os.getpid(), signal.SIGTERM)

    def stop(number: int, _: object) -> None:
        if _told.is_set():
            if number == signal.SIGHUP:  # of a thread that is older than the mask
                return
            kill_everything()
        _told.set()
        last_resort = threading.Timer(_START_STOP_SECONDS, kill_everything)
        last_resort.daemon = True
        last_resort.start()
        raise StopRequested

    for number in _SIGNALS:  # the blocked ones: for threads that are older than the mask
        signal.signal(number, stop)
    threading.Thread(target=forward, daemon=True, name="signals").start()


class Server(uvicorn.Server):
    """uvicorn without its signal handlers (they stop listening at once), saying when it listens."""

    def __init__(self, config: uvicorn.Config, on_listening: Callable[[], None]) -> None:
        super().__init__(config)
        config.timeout_graceful_shutdown = _CANCEL_SECONDS
        self._on_listening = on_listening

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        for sock in sockets or ():
            if sock.family != socket.AF_UNIX:
                # Its connections have it too: what is left of them keeps no next server away.
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        await self.listen(sockets or [])
        self._on_listening()

    async def listen(self, sockets: list[socket.socket]) -> None:
        """Run the application's start-up, then accept connections of `sockets`."""
        await super().startup(sockets)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        if cancelled := set(self.server_state.tasks):  # they have yet to end
            await asyncio.wait(cancelled, timeout=_CANCEL_SECONDS)


class Serving(Protocol):
    """What of a server is used to run and to end it."""

    should_exit: bool

    async def serve(self, sockets: list[socket.socket]) -> None: ...


async def run_until_stopped(
    server: Serving,
    sock: socket.socket,
    engine: Any,
    gate: AnyGate,
    drain_timeout: float,
    progress: Progress,
) -> int:
    """Serve until a signal or the end of the engine; returns the exit status.

    The first SIGINT, SIGTERM or SIGHUP closes the gate and gives running requests `drain_timeout`
    seconds, and what these leave of it to blocks that a KV connector is still handing over; a
    second SIGINT or SIGTERM ends this process and its children at once.
    """
    stop = asyncio.Event()

    def on_signal() -> None:
        if stop.is_set():
            kill_everything()
        _told.set()
        stop.set()

    loop = asyncio.get_running_loop()
    for number in _SIGNALS:
        loop.add_signal_handler(number, on_signal)
    serving = asyncio.create_task(server.serve(sockets=[sock]))
    stopping = asyncio.create_task(stop.wait())
    dying = asyncio.create_task(engine_death(engine))
    await asyncio.wait({serving, stopping, dying}, return_when=asyncio.FIRST_COMPLETED)
    engine_stop = _ENGINE_STOP_SECONDS
    if stop.is_set():
        began = time.monotonic()
        await _drain(gate, drain_timeout, {serving, dying}, progress)
        if not engine.errored and engine.vllm_config.kv_transfer_config is not None:
            # Its engine runs on until another one has read a prompt's blocks, or none may any more.
            engine_stop = max(engine_stop, drain_timeout - (time.monotonic() - began))
    died = engine.errored and not is_retired(engine)
    if died:
        progress.line("the engine has died")
    stopping.cancel()
    dying.cancel()
    server.should_exit = True
    await serving
    await loop.run_in_executor(None, partial(engine.shutdown, timeout=engine_stop))
    progress.line("stopped")
    return 0 if stop.is_set() and not died else 1


async def engine_death(engine: Any) -> None:
    """Returns when `engine` has died."""
    while not engine.errored or is_retired(engine):
        await asyncio.sleep(_ENGINE_CHECK_SECONDS)


async def _drain(
    gate: AnyGate, seconds: float, ending: set[asyncio.Task[None]], progress: Progress
) -> None:
    """Until all requests are answered, `seconds` are over, or one of `ending` is done."""
    gate.draining = True
    progress.line(f"stopping: running requests ({gate.running}) have {seconds:g} s to finish")
    idle = asyncio.create_task(gate.wait_idle(seconds))
    await asyncio.wait({idle, *ending}, return_when=asyncio.FIRST_COMPLETED)
    if idle.done() and not idle.result():
        progress.line(f"not finished in time and aborted: {gate.running}")
    idle.cancel()


def kill_everything() -> None:
    """End this process and all it started, now.

    But for Python's resource tracker: it ends by itself when the others have, and removes the
    shared memory (hundreds of MB an engine) that they leave behind.
    """
    tracker = getattr(resource_tracker._resource_tracker, "_pid", None)
    _kill(child for child in psutil.Process().children(recursive=True) if child.pid != tracker)
    os._exit(128 + signal.SIGTERM)


def kill(pids: Iterable[int]) -> None:
    """End these processes and all that they started, now."""
    for pid in pids:
        with suppress(psutil.Error):  # it has ended by itself
            process = psutil.Process(pid)
            _kill([*process.children(recursive=True), process])


def _kill(processes: Iterable[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.Error):  # it has ended by itself, or is another user's
            process.kill()
