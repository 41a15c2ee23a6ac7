# SPDX-License-Identifier: Apache-2.0
"""Connections of one socket, dealt out to servers that know each other's loads."""

import asyncio
import contextlib
import socket
import ssl
from contextlib import asynccontextmanager

import pytest
import uvicorn
from mla_serving.server.accept import NOT_ACCEPTING, SharingServer

from tests.serving.running_app import WAIT_SECONDS

SERVERS = 4


async def answer(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"x"})


@asynccontextmanager
async def sharing(sock, **config):
    """Servers on one socket, as of several processes."""
    loads, servers, tasks = [NOT_ACCEPTING] * SERVERS, [], []
    for index in range(SERVERS):
        listening = asyncio.Event()
        made = uvicorn.Config(answer, lifespan="off", log_level="critical", **config)
        servers.append(SharingServer(made, listening.set, loads, index))
        tasks.append(asyncio.create_task(servers[-1].serve(sockets=[sock.dup()])))
        await asyncio.wait_for(listening.wait(), WAIT_SECONDS)
    try:
        yield servers
    finally:
        for server in servers:
            server.should_exit = True
        await asyncio.gather(*tasks)
    assert loads == [NOT_ACCEPTING] * SERVERS


@pytest.fixture(params=["tcp", "unix"])
def sock(request, tmp_path):
    unix = request.param == "unix"
    sock = socket.socket(socket.AF_UNIX if unix else socket.AF_INET)
    sock.bind(str(tmp_path / "s") if unix else ("127.0.0.1", 0))
    with sock:
        yield sock


@pytest.fixture(params=["asyncio", "uvloop"])
def run_in(request):
    return pytest.importorskip(request.param).run


async def connect(sock, **tls):
    if sock.family == socket.AF_UNIX:
        return await asyncio.open_unix_connection(sock.getsockname(), **tls)
    return await asyncio.open_connection(*sock.getsockname(), **tls)


def have_load(server, load):
    server._loads[server._index] = load
    server._publish = lambda: None


async def becomes(condition):
    async with asyncio.timeout(WAIT_SECONDS):
        while not condition():
            await asyncio.sleep(0.01)


async def ask(reader, writer):
    writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    async with asyncio.timeout(WAIT_SECONDS):
        return await reader.readuntil(b"x\r\n0\r\n\r\n")


def test_a_burst_of_connections_is_dealt_out(sock, run_in):
    async def run():
        async with sharing(sock) as servers:
            pairs = await asyncio.gather(*(connect(sock) for _ in range(10 * SERVERS)))
            for answered in await asyncio.gather(*(ask(*pair) for pair in pairs)):
                assert answered.startswith(b"HTTP/1.1 200")
            held = [len(server.server_state.connections) for server in servers]
            assert sum(held) == 10 * SERVERS
            assert min(held) >= 8  # a server may be asked before it knows of the last one
            for _, writer in pairs:
                writer.close()

    run_in(run())


def test_the_next_connection_goes_where_fewest_are(sock, run_in):
    async def run():
        async with sharing(sock) as servers:
            for busy in (0, 1, 3):
                have_load(servers[busy], 100)
            pairs = [await connect(sock) for _ in range(5)]
            for pair in pairs:
                await ask(*pair)
            assert len(servers[2].server_state.connections) == 5
            for _, writer in pairs:
                writer.close()

    run_in(run())


def test_a_server_that_is_busy_keeps_no_client_waiting(sock, run_in):
    """The one with the fewest connections may not come to take another."""

    async def run():
        async with sharing(sock) as servers:
            for task in servers[0]._tasks:
                task.cancel()
            have_load(servers[0], 0)
            pairs = [await connect(sock) for _ in range(SERVERS)]
            for pair in pairs:
                assert (await ask(*pair)).startswith(b"HTTP/1.1 200")
                pair[1].close()

    run_in(run())


def test_tls_and_what_is_none(sock, run_in, tls_files):
    files = {"ssl_certfile": tls_files["cert"], "ssl_keyfile": tls_files["key"]}

    async def run():
        async with sharing(sock, **files) as servers:
            reader, writer = await connect(sock)  # what speaks no TLS is cut off
            writer.write(b"GET / HTTP/1.1\r\n\r\n")
            assert b"HTTP" not in await asyncio.wait_for(reader.read(), WAIT_SECONDS)
            writer.close()
            trusting = ssl.create_default_context()
            trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE
            pair = await connect(sock, ssl=trusting, server_hostname="localhost")
            assert (await ask(*pair)).startswith(b"HTTP/1.1 200")
            pair[1].close()
            await becomes(lambda: not any(server._connecting for server in servers))

    run_in(run())


def test_a_connection_that_fails_to_start_is_closed(sock, run_in):
    async def run():
        async with sharing(sock) as servers:
            whole = [server.config.http_protocol_class for server in servers]

            def broken(**_):
                raise RuntimeError

            for server in servers:
                server.config.http_protocol_class = broken
            reader, _ = await connect(sock)
            with contextlib.suppress(ConnectionError):
                assert await asyncio.wait_for(reader.read(), WAIT_SECONDS) == b""
            for server, protocol in zip(servers, whole, strict=True):
                server.config.http_protocol_class = protocol
            assert b"200 OK" in await ask(*await connect(sock))

    run_in(run())
