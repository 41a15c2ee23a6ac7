# SPDX-License-Identifier: Apache-2.0
"""A bare connection to a server with one of our HTTP protocols."""

import asyncio
import socket
from contextlib import asynccontextmanager

import uvicorn


@asynccontextmanager
async def connected(app, protocol):
    """A reader, a writer and the server's state."""
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    config = uvicorn.Config(app, http=protocol, lifespan="off", log_level="critical")
    server = uvicorn.Server(config)
    config.load()
    server.lifespan = config.lifespan_class(config)
    await server.startup(sockets=[sock])
    try:
        reader, writer = await asyncio.open_connection(*sock.getsockname())
        yield reader, writer, server.server_state
        writer.close()
    finally:
        server.servers[0].close()
