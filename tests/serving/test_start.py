# SPDX-License-Identifier: Apache-2.0
"""The start-up with a stand-in for vLLM: an engine that dies in the first answer is named."""

import asyncio
import sys
from argparse import Namespace
from contextlib import asynccontextmanager
from types import ModuleType, SimpleNamespace

import pytest
from fastapi import FastAPI
from fastapi.responses import JSONResponse
from mla_serving.server import run
from mla_serving.server.progress import Progress

from tests.serving.conftest import FakeEngine


def test_an_engine_that_dies_in_the_first_answer(monkeypatch):
    app = FastAPI()
    engine = FakeEngine()
    engine.model_config = SimpleNamespace(max_model_len=64)

    @app.post("/v1/completions")
    async def completions():
        app.state.server.should_exit = True  # as vLLM's handler for a dead engine does
        return JSONResponse({"error": {"message": "EngineDeadError", "code": 500}}, 500)

    @asynccontextmanager
    async def client(args):
        yield engine

    async def tasks():
        return ("generate",)

    async def nothing(*args):
        return None

    engine.get_supported_tasks = tasks
    vllm_api = ModuleType("vllm_api")
    vllm_api.VLLM_VERSION = "0"
    vllm_api.build_async_engine_client = client
    vllm_api.build_app = lambda *args: app
    vllm_api.init_app_state = nothing
    vllm_api.api_keys = lambda args: []
    vllm_api.engine_gauges = dict
    http = ModuleType("http")
    http.make_server = lambda *args: SimpleNamespace(should_exit=False)
    for name, module in (("vllm_api", vllm_api), ("http", http)):
        monkeypatch.setitem(sys.modules, f"mla_serving.server.{name}", module)
        monkeypatch.setattr(f"mla_serving.server.{name}", module, raising=False)
    args = Namespace(
        model="m", served_model_name=["demo"], root_path="", mla_max_requests=0,
        mla_max_body_mib=1.0, mla_hang_timeout=1.0, mla_no_warmup=False, mla_drain_timeout=1.0,
    )  # fmt: skip
    with pytest.raises(RuntimeError, match=r"first answer failed: .*EngineDeadError"):
        asyncio.run(run._serve(args, None, Progress()))
