# SPDX-License-Identifier: Apache-2.0
"""A stand-in for vLLM's application and engine: the HTTP layers are tested without a model."""

import asyncio
import json
import shutil
import subprocess
from argparse import Namespace
from contextlib import asynccontextmanager
from types import SimpleNamespace

import httpx
import pytest
import torch
from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from mla_serving.server.admission import Gate
from mla_serving.server.app import build_root_app
from mla_serving.server.info import Info
from mla_serving.server.shared_gate import SharedGate
from mla_serving.server.watchdog import Watchdog

# vLLM's options of CORS: pages of one site may ask.
CORS = {
    "allowed_origins": ["http://x"],
    "allow_credentials": False,
    "allowed_methods": ["*"],
    "allowed_headers": ["*"],
}
# vLLM's words on a request that its engine ended with an error.
GIVEN_UP = {
    "error": {
        "message": "Internal server error",
        "type": "InternalServerError",
        "param": None,
        "code": 500,
    }
}


class VLLMClientError(Exception):
    """As vLLM's, by name."""


class TooLargeError(VLLMClientError):
    """What vLLM raises of a field, as its VLLMValidationError."""

    parameter = "top_logprobs"


# What vLLM answers in its own shape, unless its answer has begun.
HANDLED = {
    "field": TooLargeError("too large"),
    "value": ValueError("not like this"),
    "type": TypeError("private text"),
    "nan": ValueError("Out of range float values are not JSON compliant"),
}


class FakeEngine:
    """What the server reads of vLLM's engine client."""

    def __init__(self, kv_transfer=None, drafts=False):
        self.errored = False
        self.stopped = self.closed = False
        self.rpc_delay = 0.0
        self.vllm_config = SimpleNamespace(
            model_config=SimpleNamespace(
                dtype=torch.bfloat16,
                max_model_len=512,
                hf_text_config=SimpleNamespace(kv_lora_rank=512, qk_rope_head_dim=64),
            ),
            attention_config=SimpleNamespace(backend=SimpleNamespace(name="CUSTOM")),
            cache_config=SimpleNamespace(cache_dtype="auto", block_size=64, num_gpu_blocks=101),
            kv_transfer_config=kv_transfer,
            speculative_config=object() if drafts else None,
            use_v2_model_runner=False,
        )

    async def collective_rpc(self, method):
        await asyncio.sleep(self.rpc_delay)
        return [{"rank": 0, "method": method}]

    def shutdown(self, timeout):
        self.stopped, self.stop_seconds = True, timeout

    async def generate(self, prompt, sampling_params, request_id):
        """Ends as `prompt` says."""
        ends = prompt["ends"]
        try:
            for reason in (None, ends):
                yield SimpleNamespace(outputs=[SimpleNamespace(finish_reason=reason)])
        finally:
            self.closed = True


def make_vllm_app(events, engine):
    """An application with the habits of vLLM's: FastAPI's own error shape, streams, a lifespan."""

    @asynccontextmanager
    async def lifespan(_):
        events.append("started")
        yield
        events.append("ended")
        del app.state

    app = FastAPI(lifespan=lifespan)
    app.state.release = asyncio.Event()

    @app.post("/v1/echo")
    async def echo(request: Request):
        body = await request.body()
        events.append(len(body))
        return {"bytes": len(body), "sum": sum(body)}

    @app.post("/v1/messages")
    @app.post("/v1/stream")
    async def stream(named: bool = False, events_first: int = 3):
        async def chunks():
            try:
                for i in range(events_first):
                    yield "event: x\n" * named + f"data: {i}\n\n"
                await app.state.release.wait()
                yield "data: [DONE]\n\n"
            except asyncio.CancelledError:
                events.append("cancelled")
                raise

        return StreamingResponse(chunks(), media_type="text/event-stream")

    @app.post("/v1/wait")
    async def wait():
        await app.state.release.wait()

    @app.post("/v1/heeded")
    async def heeded(request: Request):
        """As vLLM's routes without a stream: computed in one task, while another listens for a
        client that leaves."""

        async def compute():
            try:
                await app.state.release.wait()
            except asyncio.CancelledError:
                events.append("cancelled")
                raise

        async def listen():
            while (await request.receive())["type"] != "http.disconnect":
                pass
            events.append(f"left, load {getattr(request.app.state, 'load', 0)}")

        tasks = [asyncio.create_task(compute()), asyncio.create_task(listen())]
        _, others = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for other in others:
            other.cancel()

    @app.post("/resume")
    async def resume():
        app.state.release.set()

    @app.post("/wake_up")
    async def wake_up():
        await asyncio.Event().wait()

    @app.post("/v1/fail")
    async def fail(how: str):
        if how == "detail":
            raise HTTPException(422, detail=[{"loc": ["body"], "msg": "bad"}])
        if how == "string":
            return JSONResponse({"error": "Unauthorized"}, 401)
        if how == "shaped":
            return JSONResponse({"error": {"message": "m", "code": 404}}, 404)
        if how == "nan":
            message = "Out of range float values are not JSON compliant"
            return JSONResponse({"error": {"message": message, "code": 400}}, 400)
        if how == "silent":
            return JSONResponse({"error": {"message": "", "param": "p", "code": 500}}, 500)
        if how == "raw":
            return StreamingResponse(iter([b"pla", b"in"]), 502, media_type="text/plain")
        if how == "packed":
            return Response(b"\x1f\x8b", 500, {"content-encoding": "gzip-by-hand"})
        if how == "endless":
            return StreamingResponse(iter([b"x" * 40_000] * 3), 500, media_type="text/plain")
        if how == "stream":
            return StreamingResponse(iter(["data: x\n\n"]), 500, media_type="text/event-stream")
        if how == "amid":
            return StreamingResponse(1 / (2 - i) for i in range(3))
        raise ZeroDivisionError("private text")

    async def handled(request, error):
        param = getattr(error, "parameter", None)
        status = 500 if request.app is not app else 422 if param else 400
        return JSONResponse({"error": {"message": str(error), "param": param}}, status)

    for error in (VLLMClientError, ValueError, TypeError):
        app.add_exception_handler(error, handled)

    @app.post("/v1/responses")
    @app.post("/v1/late")
    async def late(how: str, named: bool = True, events_first: int = 1):
        """As vLLM's streamed responses, which check some fields when they generate."""

        async def chunks():
            for i in range(events_first):
                yield "event: x\n" * named + f"data: {i}\n\n"
            raise HANDLED.get(how) or ZeroDivisionError("private text")

        return StreamingResponse(chunks(), media_type="text/event-stream")

    @app.post("/v1/generate")
    async def generate(how: str, grammar: bool = True, ends: str = "error", kind: str = "token"):
        """As vLLM's routes say that the engine ended a request with an error."""
        params = SimpleNamespace(structured_outputs="of it" if grammar else None)

        async def run():
            async for output in engine.generate({"type": kind, "ends": ends}, params, "id"):
                yield output.outputs[0].finish_reason

        async def chunks():
            async for reason in run():
                if reason != "error":
                    yield "event: x\n" * (how != "chat") + f"data: {reason}\n\n"
                elif how == "responses":
                    raise ZeroDivisionError
                elif how == "messages":
                    error = json.dumps({"type": "error", **GIVEN_UP})
                    yield f"event: error\ndata: {error}\n\n"
                else:
                    yield f"data: {json.dumps(GIVEN_UP)}\n\n"
            yield "data: [DONE]\n\n"

        if how == "unstreamed":
            reasons = [reason async for reason in run()]
            return JSONResponse(GIVEN_UP, 500) if reasons[-1] == "error" else {"reasons": reasons}
        return StreamingResponse(chunks(), media_type="text/event-stream")

    @app.get("/health")
    async def health():
        return {"from": "vllm"}

    @app.get("/metrics")
    async def metrics():
        return {"from": "vllm"}

    return app


class Stand:
    """One root application and all that it was made of."""

    def __init__(
        self,
        *,
        keys=(),
        limit=0,
        body_mib=8.0,
        root_path="",
        hang_timeout=0.1,
        kv_transfer=None,
        drafts=False,
        open_metrics=False,
        request_ids=False,
        shared=False,
        middleware=(),
    ):
        self.engine = FakeEngine(kv_transfer, drafts)
        self.events = []
        self.gauges = {}
        self.vllm_app = make_vllm_app(self.events, self.engine)
        self.gate = (SharedGate if shared else Gate)(limit)
        ask = self.engine.collective_rpc
        self.info = Info(self.engine, self.gate, ["demo"], lambda: self.gauges, ask, "0.32.0")
        args = Namespace(
            root_path=root_path,
            middleware=list(middleware),
            mla_max_body_mib=body_mib,
            mla_open_metrics=open_metrics,
            enable_request_id_headers=request_ids,
            **CORS,
        )
        self.watchdog = Watchdog(self.engine, hang_timeout)
        self.app = build_root_app(
            self.vllm_app, self.engine, self.gate, self.info, self.watchdog, args, list(keys)
        )

    def client(self):
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        return httpx.AsyncClient(transport=transport, base_url="http://test")

    def request(self, method, path, **kwargs):
        async def send():
            async with self.client() as client:
                return await client.request(method, path, **kwargs)

        return asyncio.run(send())


@pytest.fixture(scope="session")
def tls_files(tmp_path_factory):
    """A certificate, its key, another key, what is none of them, and a file that is not there."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl to make certificates with")
    folder = tmp_path_factory.mktemp("tls")
    paths = {name: folder / f"{name}.pem" for name in ("cert", "key", "other", "junk", "nowhere")}
    for cert, key in (("cert", "key"), ("junk", "other")):
        made = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
        made += ["-nodes", "-subj", "/CN=x", "-keyout", paths[key], "-out", paths[cert]]
        subprocess.run(made, check=True, capture_output=True)
    paths["junk"].write_text("junk\n")
    return {name: str(path) for name, path in paths.items()} | {"folder": str(folder)}


@pytest.fixture
def stand():
    return Stand


def openai_error(response):
    """The error of an answer; fails unless it has OpenAI's shape and repeats the status."""
    error = json.loads(response.content)["error"]
    assert set(error) >= {"message", "type", "code"}
    assert error["message"] and error["code"] == response.status_code
    return error


@pytest.fixture(name="openai_error")
def openai_error_fixture():
    return openai_error
