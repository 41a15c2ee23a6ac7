# SPDX-License-Identifier: Apache-2.0
"""A root application on a real socket, with a stand-in for vLLM."""

import asyncio
import os
import signal
import socket

import httpx
import uvicorn
from mla_serving.server import lifecycle
from mla_serving.server.progress import Progress

WAIT_SECONDS = 60  # for what takes a moment, but where other processes want the cores


class Running:
    """A root application served by uvicorn until stopped, with a client."""

    def __init__(self, stand, drain_timeout=5.0, **kwargs):
        self.stand = stand(**kwargs)
        self.drain_timeout = drain_timeout

    async def __aenter__(self):
        sock = socket.socket()
        sock.bind(("127.0.0.1", 0))
        listening = asyncio.Event()
        config = uvicorn.Config(self.stand.app, log_level="warning")
        self.server = lifecycle.Server(config, listening.set)
        self.task = asyncio.create_task(
            lifecycle.run_until_stopped(
                self.server,
                sock,
                self.stand.engine,
                self.stand.gate,
                self.drain_timeout,
                Progress(),
            )
        )
        await asyncio.wait_for(listening.wait(), WAIT_SECONDS)
        port = sock.getsockname()[1]
        url = f"http://127.0.0.1:{port}"
        self.client = httpx.AsyncClient(base_url=url, timeout=WAIT_SECONDS)
        return self

    async def __aexit__(self, *_):
        await self.client.aclose()
        if not self.task.done():
            if not self.stand.gate.draining:  # a second signal would end these tests
                os.kill(os.getpid(), signal.SIGTERM)
            await self.task

    async def stream(self, path="/v1/stream"):
        """Lines of a stream that ends when `release` is set; returns after the first line."""
        lines = []
        first = asyncio.Event()

        async def read():
            async with self.client.stream("POST", path) as answer:
                assert answer.status_code == 200
                async for line in answer.aiter_lines():
                    lines.append(line)
                    first.set()
            return [line for line in lines if line]

        task = asyncio.create_task(read())
        await asyncio.wait_for(first.wait(), WAIT_SECONDS)
        self.lines = lines
        return task

    def release(self):
        self.stand.vllm_app.state.release.set()


DONE = ["data: 0", "data: 1", "data: 2", "data: [DONE]"]
