# SPDX-License-Identifier: Apache-2.0
"""The start-up with a stand-in for vLLM: what it says when it fails."""

import asyncio
import importlib
import subprocess
import sys
from argparse import Namespace
from contextlib import asynccontextmanager
from types import ModuleType, SimpleNamespace

import pydantic
import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from mla_serving.server import lifecycle, run, warmup
from mla_serving.server.progress import Progress

from mla_backend.refusals import RefusalError
from tests.serving.conftest import FakeEngine


def stand_in(monkeypatch, **modules):
    """Put `modules` in the place of the server's."""
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, f"mla_serving.server.{name}", module)
        monkeypatch.setattr(f"mla_serving.server.{name}", module, raising=False)


@pytest.mark.parametrize(
    ("refusal", "said"),
    [
        (None, ["no engine"]),
        ("256 heads. Mend: TP 2", ["no engine", "256 heads. Mend: TP 2"]),
        ("no engine", ["no engine"]),  # of this process: said once
    ],
)
def test_a_start_that_fails_gives_its_address_back(refusal, said, monkeypatch, capsys):
    async def fail(*args):
        if refusal:
            RefusalError(refusal)  # in a worker, of which vLLM tells the server nothing
        raise RuntimeError("no engine")

    closed = []
    args, http, vllm_api = (ModuleType(name) for name in ("args", "http", "vllm_api"))
    parsed = Namespace(api_server_count=None)
    args.parse = lambda layers: parsed
    vllm_api.prepare = lambda args: None
    http.bind = lambda args: "socket"
    http.unbind = lambda *both: closed.append(both)
    stand_in(monkeypatch, args=args, http=http, vllm_api=vllm_api)
    monkeypatch.setattr(run.lifecycle, "catch_signals_while_starting", lambda: None)
    monkeypatch.setattr(run.environment, "set_before_import", lambda local: None)
    monkeypatch.setattr(run, "_serve", fail)
    assert run.serve([]) == 1
    assert capsys.readouterr().err == "".join(f"mla-backend serve: {x}\n" for x in said)
    assert closed == [("socket", parsed)]


def test_the_doctor_is_named_for_what_it_looks_at():
    """Not for a package that an option needs, as suffix decoding does, which vLLM names."""
    with pytest.raises(ImportError) as failed:
        importlib.import_module("mla_no_such_module")
    assert "`mla-backend doctor` says how" in run._what(failed.value)
    words = "Arctic Inference is required. Install via `pip install arctic-inference`."
    assert run._what(ImportError(words)) == words


def test_no_directory_for_temporary_files_is_a_sentence():
    """As in a container whose root is read-only."""
    code = (
        "import sys, tempfile; from mla_serving.cli import main\n"
        "tempfile._candidate_tempdir_list = lambda: ['/nowhere']\n"
        "sys.exit(main(['serve']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "mla-backend serve: [Errno 2] No usable temporary directory found in ['/nowhere']"
    )
    assert "Traceback" not in done.stderr


class Unused:
    """Middleware of a user; the first answer does not ask it."""

    def __init__(self, app):
        self.app = app

    async def __call__(self, *message):
        raise AssertionError


def serve_with(monkeypatch, app):
    """The exit code of a server whose vLLM is `app`."""
    engine = FakeEngine()
    engine.model_config = SimpleNamespace(max_model_len=64)

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

    def build_app(args, tasks, config):
        assert args.middleware == []  # or it would run twice, in the first answer too
        return app

    vllm_api.build_app = build_app
    vllm_api.init_app_state = nothing
    vllm_api.api_keys = lambda args: []
    vllm_api.engine_gauges, vllm_api.ask_workers = lambda processes: {}, nothing
    vllm_api.count_engines = lambda engine: 1
    http = ModuleType("http")
    http.make_server = lambda *args: SimpleNamespace(should_exit=False)
    stand_in(monkeypatch, vllm_api=vllm_api, http=http)
    args = Namespace(
        model="m", served_model_name=["demo"], root_path="", mla_max_requests=0,
        api_server_count=None,
        mla_max_body_mib=1.0, mla_open_metrics=False, mla_hang_timeout=1.0, mla_no_warmup=False,
        enable_request_id_headers=False, middleware=["tests.serving.test_start.Unused"],
        mla_drain_timeout=1.0,
        allowed_origins=["*"], allow_credentials=False, allowed_methods=["*"],
        allowed_headers=["*"],
    )  # fmt: skip
    return asyncio.run(run._serve(args, None, Progress()))


def test_an_engine_that_dies_in_the_first_answer(monkeypatch):
    app = FastAPI()

    @app.post("/v1/completions")
    async def completions():
        app.state.server.should_exit = True  # as vLLM's handler for a dead engine does
        return JSONResponse({"error": {"message": "EngineDeadError", "code": 500}}, 500)

    with pytest.raises(RuntimeError, match=r"first answer failed: .*EngineDeadError"):
        serve_with(monkeypatch, app)


def test_a_refused_first_answer_is_said(monkeypatch, capsys):
    async def stopped(*args):
        return 0

    monkeypatch.setattr(lifecycle, "run_until_stopped", stopped)
    assert serve_with(monkeypatch, FastAPI()) == 0  # without a route for completions
    said = capsys.readouterr().out.splitlines()[-1]
    assert said.endswith('no first answer, so a user\'s may be slow: {"detail":"Not Found"}')


def test_the_first_answer_uses_what_a_user_may_be_the_first_to_use():
    app, asked = FastAPI(), []

    @app.post("/v1/completions")
    async def completions(body: dict):
        asked.append(body)

    asyncio.run(warmup.first_answers(app, "demo", 64, [], 1))
    (body,) = asked
    assert body["logprobs"] == 0  # several seconds of vLLM's the first time
    assert len(body["prompt"]) == 8 and body["max_tokens"] == 4


def test_every_engine_answers_first():
    """At once: data-parallel ones wait for each other."""
    app, asked, all_there = FastAPI(), [], asyncio.Event()

    @app.post("/v1/completions")
    async def completions(request: Request):
        asked.append(request.headers.get("X-data-parallel-rank"))
        if len(asked) == 3:
            all_there.set()
        await asyncio.wait_for(all_there.wait(), 10)

    asyncio.run(warmup.first_answers(app, "demo", 64, [], 3))
    assert sorted(asked) == ["0", "1", "2"]
    asked.append("another")
    asyncio.run(warmup.first_answers(app, "demo", 64, [], 1))
    assert asked[4:] == [None]


class Config(pydantic.BaseModel):
    length: int = pydantic.Field(1, ge=-1)
    model: str = "m"

    @pydantic.model_validator(mode="after")
    def check(self):
        if self.model != "m":
            raise ValueError(f"no such model: {self.model}")
        return self


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"model": "x"}, "no such model: x"),
        ({"length": -5}, "length: Input should be greater than or equal to -1"),
        ({"length": "y", "model": 3}, "length: Input should be a valid integer, unable to parse "
         "string as an integer; model: Input should be a valid string"),
    ],
)  # fmt: skip
def test_a_refusal_of_vllms_configuration_is_said_without_its_frame(values, said):
    with pytest.raises(pydantic.ValidationError) as refused:
        Config(**values)
    assert run._what(refused.value) == said


def test_a_failure_without_words_has_a_name():
    assert run._what(ValueError("bad value")) == "bad value"
    assert run._what(AssertionError()) == "AssertionError"
    with pytest.raises(ZeroDivisionError) as failed:
        1 % len("")
    said = run._what(failed.value)
    assert said.startswith("ZeroDivisionError: ") and "test_start.py, line" in said
    assert '(1 % len(""));' in said
    with pytest.raises(AssertionError) as failed:
        raise AssertionError
    said = run._what(failed.value)
    assert said.startswith("AssertionError, in ") and "(raise AssertionError);" in said
