# SPDX-License-Identifier: Apache-2.0
"""Connections of one listening socket, dealt out to several processes."""

import asyncio
import logging
import socket
from collections.abc import Callable, Coroutine, MutableSequence
from typing import Any

import uvicorn

from mla_serving.server.lifecycle import Server

NOT_ACCEPTING = 2**31 - 1  # a load that is never the least one
# How long a process leaves a connection to one that has fewer, which may be busy.
_DEFERRALS = 5
_DEFER_SECONDS = 0.001
_RETRY_SECONDS = 1.0  # as asyncio's own server, where no file descriptor is left
_LOG = logging.getLogger("uvicorn.error")


class SharingServer(Server):
    """A server whose socket other processes accept from too: the one with the fewest connections
    takes the next.

    The server of an event loop takes all that wait, in whichever process wakes first: of a burst of
    clients one process would have nearly all. vLLM deals them out in this way from 0.32 on.

    Args:
        config: of uvicorn, loaded.
        on_listening: called once connections can be made.
        loads: open connections of each process, in memory that they share.
        index: of this process.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        on_listening: Callable[[], None],
        loads: MutableSequence[int],
        index: int,
    ) -> None:
        super().__init__(config, on_listening)
        self._loads, self._index = loads, index
        self._connecting = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def listen(self, sockets: list[socket.socket]) -> None:
        await super().listen([])  # without sockets: all but accepting
        self._publish()
        for sock in sockets:
            sock.listen(self.config.backlog)
            sock.setblocking(False)
            self._start(self._accept(sock))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for task in (tasks := list(self._tasks)):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._loads[self._index] = NOT_ACCEPTING
        await super().shutdown(sockets)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _publish(self) -> None:
        self._loads[self._index] = len(self.server_state.connections) + self._connecting

    async def _accept(self, sock: socket.socket) -> None:
        while True:
            await _readable(sock)
            self._publish()  # some may have closed
            for _ in range(_DEFERRALS):
                if self._loads[self._index] <= min(self._loads):
                    break
                await asyncio.sleep(_DEFER_SECONDS)
            try:
                connection, _ = sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                continue  # another process has it, or it has gone
            except OSError as error:
                _LOG.error("cannot accept a connection: %s", error)
                await asyncio.sleep(_RETRY_SECONDS)
                continue
            self._connecting += 1
            self._publish()
            self._start(self._connect(connection))  # a slow TLS handshake keeps no other waiting

    async def _connect(self, connection: socket.socket) -> None:
        loop, config = asyncio.get_running_loop(), self.config

        def protocol() -> asyncio.Protocol:
            return config.http_protocol_class(  # type: ignore[call-arg]
                config=config,
                server_state=self.server_state,
                app_state=self.lifespan.state,
                _loop=loop,
            )

        try:
            await loop.connect_accepted_socket(protocol, connection, ssl=config.ssl)
        except Exception as error:  # of the handshake, say
            _LOG.debug("a connection failed to start: %s", error)
            connection.close()
        except asyncio.CancelledError:
            connection.close()
            raise
        finally:
            self._connecting -= 1
            self._publish()


async def _readable(sock: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(sock, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(sock)
