# SPDX-License-Identifier: Apache-2.0
"""One process's application around its client of the engine."""

import asyncio
from argparse import Namespace
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

from fastapi import FastAPI

from mla_serving.server.admission import AnyGate


@dataclass(frozen=True)
class Assembly:
    """What serves: our application around vLLM's.

    tasks: what the engine can be asked for, as "generate".
    name: under which the model is served.
    keys: API keys of clients; none leaves the server open.
    """

    app: FastAPI
    vllm_app: FastAPI
    engine: Any
    tasks: tuple[str, ...]
    name: str
    keys: list[str]

    async def first_answers(self) -> str | None:
        """See `warmup.first_answers`."""
        from mla_serving.server import vllm_api, warmup

        max_len = self.engine.model_config.max_model_len
        count = vllm_api.count_engines(self.engine)
        return await warmup.first_answers(self.vllm_app, self.name, max_len, self.keys, count)


async def assemble(stack: AsyncExitStack, engine: Any, gate: AnyGate, args: Namespace) -> Assembly:
    """The application for `engine`, watched until `stack` is closed."""
    from mla_serving.server import vllm_api
    from mla_serving.server.app import build_root_app
    from mla_serving.server.info import Info
    from mla_serving.server.watchdog import Watchdog

    tasks = await engine.get_supported_tasks()
    theirs = Namespace(**{**vars(args), "middleware": []})  # it is around our application
    vllm_app = vllm_api.build_app(theirs, tasks, engine.model_config)
    await vllm_api.init_app_state(engine, vllm_app.state, args, tasks)
    names = args.served_model_name or [args.model]
    ask = partial(vllm_api.ask_workers, engine)
    gauges = partial(vllm_api.engine_gauges, args.api_server_count or 1)
    info = Info(engine, gate, names, gauges, ask, vllm_api.VLLM_VERSION)
    keys = vllm_api.api_keys(args)
    watchdog = Watchdog(engine, args.mla_hang_timeout)
    watching = asyncio.create_task(watchdog.run())
    stack.callback(watching.cancel)
    app = build_root_app(vllm_app, engine, gate, info, watchdog, args, keys)
    return Assembly(app, vllm_app, engine, tuple(tasks), names[0], keys)
