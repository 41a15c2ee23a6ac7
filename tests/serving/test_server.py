# SPDX-License-Identifier: Apache-2.0
"""One real server: vLLM's engine, our attention, our HTTP front end. The last test stops it."""

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import psutil
import pytest

from tests.serving.server_process import ServerProcess

pytestmark = pytest.mark.engine

MODEL = "demo"
KEY = "test-key"
CONTEXT = 1024
HANG_SECONDS = 3
GREEDY = {"model": MODEL, "temperature": 0, "seed": 1}
CHAT = {**GREEDY, "messages": [{"role": "user", "content": "def main(argv):"}]}
COMPLETION = {**GREEDY, "prompt": "import os\nimport sys\n"}


@pytest.fixture(scope="module")
def server(demo_checkpoint, tmp_path_factory):
    with ServerProcess(
        str(demo_checkpoint("v3")),
        *("--served-model-name", MODEL, "--dtype", "float32", "--enforce-eager"),
        *("--max-model-len", str(CONTEXT), "--kv-cache-memory-bytes", "256M"),
        *("--mla-hang-timeout", str(HANG_SECONDS)),
        key=KEY,
        log=tmp_path_factory.mktemp("server") / "log",
    ) as server:
        yield server


@pytest.fixture(scope="module")
def client(server):
    with server.client() as client:
        yield client


def events(client, path, body):
    """The decoded events of a stream, up to [DONE]."""
    with client.stream("POST", path, json={**body, "stream": True}) as answer:
        assert answer.status_code == 200
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def info(client):
    return client.get("/mla/info").json()


def wait_for(condition, seconds=20):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


def test_start_up_says_how_far_it_is(server):
    log = server.log.read_text()
    lines = [line for line in log.splitlines() if line.startswith("mla-backend [")]
    said = [line.partition("] ")[2] for line in lines if "still" not in line]
    for line, start in zip(
        said,
        ["importing vLLM", "loading ", "computing a first answer", "ready: demo at http"],
        strict=True,
    ):
        assert line.startswith(start)
    assert f"curl {server.url}/v1/chat/completions" in log


def test_models(client):
    (model,) = client.get("/v1/models").json()["data"]
    assert (model["id"], model["max_model_len"]) == (MODEL, CONTEXT)


def test_our_backend_computes(client):
    before = info(client)
    assert before["attention"]["backend"] == "CUSTOM"
    assert before["cache"]["block_size"] == 64
    assert before["cache"]["layout"] == "[blocks, 64, 576] float32: 512 latent, 64 rope"
    layers, new_tokens = 4, 9
    client.post("/v1/completions", json={**COMPLETION, "max_tokens": new_tokens})
    (was,), (now,) = before["attention"]["workers"], info(client)["attention"]["workers"]
    assert now["backends"] == {"CUSTOM": layers}
    assert now["decode"]["impl"] == "torch"
    assert "cpu" in now["decode"]["reason"]
    # The first token comes out of the prefill.
    assert now["forward_mqa_calls"] - was["forward_mqa_calls"] == layers * (new_tokens - 1)
    assert now["forward_mha_calls"] > was["forward_mha_calls"]


@pytest.mark.parametrize(
    ("path", "body", "text"),
    [
        ("/v1/chat/completions", CHAT, lambda c: c["message"]["content"]),
        ("/v1/completions", COMPLETION, lambda c: c["text"]),
    ],
)
def test_streaming_and_not_streaming_agree(client, path, body, text):
    body = {**body, "max_tokens": 48}
    whole = client.post(path, json=body).json()
    parts = events(client, path, {**body, "stream_options": {"include_usage": True}})
    pieces = [choice for event in parts for choice in event["choices"]]
    streamed = "".join(c["text"] if "text" in c else c["delta"].get("content", "") for c in pieces)
    assert streamed == text(whole["choices"][0]) != ""
    assert len(pieces) > 10  # it really came in pieces
    assert pieces[-1]["finish_reason"] == whole["choices"][0]["finish_reason"]
    assert parts[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]


def test_the_openai_client(server):
    ours = openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0)
    options = {"model": MODEL, "messages": CHAT["messages"], "temperature": 0, "max_tokens": 16}
    answer = ours.chat.completions.create(**options).choices[0].message.content
    stream = ours.chat.completions.create(**options, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == answer
    with pytest.raises(openai.NotFoundError, match="nope"):
        ours.chat.completions.create(**{**options, "model": "nope"})
    with pytest.raises(openai.BadRequestError, match="max_tokens"):
        ours.completions.create(model=MODEL, prompt="x", max_tokens=-1)
    other = openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0)
    with pytest.raises(openai.AuthenticationError, match="API key"):
        other.models.list()


JSON = {"content-type": "application/json"}
BAD = {
    "unknown model": (404, {"json": {**COMPLETION, "model": "nope"}}),
    "negative max_tokens": (400, {"json": {**COMPLETION, "max_tokens": -1}}),
    "temperature": (400, {"json": {**COMPLETION, "temperature": -1}}),
    "no prompt": (400, {"json": {"model": MODEL}}),
    "wrong type": (400, {"json": {**COMPLETION, "max_tokens": "many"}}),
    "token outside the vocabulary": (400, {"json": {**COMPLETION, "prompt": [10**6]}}),
    "invalid JSON": (400, {"content": b'{"model": ', "headers": JSON}),
    "not UTF-8": (400, {"content": b"\xff\xfe", "headers": JSON}),
    "no JSON": (400, {"content": b"prompt=x", "headers": {"content-type": "text/plain"}}),
    "no body": (400, {"headers": JSON}),
    "prompt over the context": (400, {"json": {**COMPLETION, "prompt": [5] * (CONTEXT + 1)}}),
    **{
        f"a grammar of {name}": (400, {"json": {**COMPLETION, **asked}})
        for name, asked in {
            "itself alone": {"structured_outputs": {"json": {"$ref": "#"}}},
            "no allowed token": {"structured_outputs": {"choice": ["a"]}, "allowed_token_ids": [1]},
        }.items()
    },
    # What its engine cannot pickle for its workers.
    "nested 500 deep": (
        400,
        {
            "content": b'{"model": "demo", "prompt": "a", "kv_transfer_params": %s1%s}'
            % (b'{"a": ' * 500, b"}" * 500),
            "headers": JSON,
        },
    ),
    "300 headers": (431, {"headers": [("x", "y")] * 300}),
    "10 MB": (413, {"json": {**COMPLETION, "prompt": "x" * 10_000_000}}),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_request_gets_its_error_and_the_server_goes_on(client, openai_error, case):
    status, request = BAD[case]
    answer = client.post("/v1/completions", **request)
    assert openai_error(answer)["code"] == status
    assert client.get("/health").status_code == 200
    good = client.post("/v1/completions", json={**COMPLETION, "max_tokens": 2})
    assert good.json()["usage"]["completion_tokens"] == 2


CIRCLE = {"$ref": "#"}  # a schema that nothing satisfies
TEXT_FORMAT = {"format": {"type": "json_schema", "name": "x", "schema": CIRCLE}}


@pytest.mark.parametrize(
    ("path", "body"),
    {
        "completions": {**COMPLETION, "structured_outputs": {"json": CIRCLE}},
        "chat/completions": {**CHAT, "structured_outputs": {"json": CIRCLE}},
        "responses": {"model": MODEL, "input": "x", "text": TEXT_FORMAT},
    }.items(),
)
def test_a_stream_says_that_its_grammar_is_at_fault(client, path, body):
    answer = client.post(f"/v1/{path}", json={**body, "stream": True})
    said = [line.removeprefix("data: ") for line in answer.text.splitlines() if '"error":' in line]
    errors = [error for line in said if (error := json.loads(line).get("error"))]
    assert [error["code"] for error in errors] == [400]
    assert "grammar that the request asks for" in errors[0]["message"]


# What vLLM checks of a response when it generates: a stream has begun by then.
LATE = {
    "regex": {"structured_outputs": {"regex": "("}},
    "grammar": {"structured_outputs": {"grammar": "x"}},
    "schema": {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "no"}}}},
    "choice": {"structured_outputs": {"choice": []}},
    "logit_bias": {"logit_bias": {"999999": 5}},
    "top_logprobs": {"top_logprobs": 25, "include": ["message.output_text.logprobs"]},
}


@pytest.mark.parametrize("case", LATE)
def test_a_streamed_response_says_what_is_refused_late(server, client, openai_error, case):
    """To OpenAI's client, in the words of the same refusal without streaming."""
    body = {"model": MODEL, "input": "x", "max_output_tokens": 2}
    refused = openai_error(client.post("/v1/responses", json={**body, **LATE[case]}))
    ours = openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0)
    seen = []
    with pytest.raises(openai.APIError) as caught:
        for event in ours.responses.create(**body, stream=True, extra_body=LATE[case]):
            seen.append(event.type)
    assert seen == ["response.created", "response.in_progress"]
    assert caught.value.body == refused and refused["code"] == 400
    assert caught.value.message == refused["message"]


@pytest.mark.parametrize(
    ("method", "path", "status"), [("GET", "/v1/nothing", 404), ("GET", "/v1/completions", 405)]
)
def test_wrong_route_or_method(client, openai_error, method, path, status):
    assert openai_error(client.request(method, path))["code"] == status


def test_the_key_covers_every_route_but_health(server, client, openai_error):
    routes = client.get("/openapi.json").json()["paths"]
    assert "/v1/chat/completions" in routes
    paths = {path.replace("{", "").replace("}", "") for path in routes}
    paths |= {"/metrics", "/mla/info", "/docs", "/redoc", "/openapi.json", "/", "/nowhere"}
    with httpx.Client(base_url=server.url) as stranger:
        assert stranger.get("/health").status_code == 200
        for path in sorted(paths - {"/health"}):
            for method in ("GET", "POST", "DELETE"):
                assert openai_error(stranger.request(method, path))["code"] == 401, (method, path)


def test_metrics(client):
    text = client.get("/metrics").text
    for name in ("vllm:kv_cache_usage_perc", 'mla_http_answers_total{status="200"}'):
        assert name in text


def test_a_client_that_leaves_frees_its_blocks(server, client):
    def used():
        return info(client)["cache"]["blocks_used"]

    wait_for(lambda: used() == 0)
    with server.client() as leaver:
        body = {**COMPLETION, "max_tokens": CONTEXT - 40, "ignore_eos": True, "stream": True}
        with leaver.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            for _ in range(8):
                next(lines)
            assert used() >= 1
            assert info(client)["requests"]["running"] == 1
    wait_for(lambda: used() == 0 and info(client)["requests"]["running"] == 0)


def test_64_parallel_requests_all_finish(server):
    def ask(i):
        prompt = [3 + (i * 37 + j) % 2000 for j in range(1 + 7 * i)]
        body = {**GREEDY, "prompt": prompt, "max_tokens": 8 + i % 9, "ignore_eos": True}
        answer = client.post("/v1/completions", json=body)
        return answer.status_code, answer.json()["usage"]["completion_tokens"]

    limits = httpx.Limits(max_connections=64)
    with server.client(limits=limits) as client, ThreadPoolExecutor(64) as pool:
        answers = list(pool.map(ask, range(64)))
    assert answers == [(200, 8 + i % 9) for i in range(64)]


def engine_processes(server):
    children = psutil.Process(server.process.pid).children(recursive=True)
    return [child for child in children if "EngineCore" in " ".join(child.cmdline())]


def test_health_fails_while_the_engine_hangs(server, client, openai_error):
    (engine,) = engine_processes(server)
    assert client.get("/health").status_code == 200
    engine.suspend()
    try:
        start = time.monotonic()
        wait_for(lambda: client.get("/health").status_code == 503)
        # Asked every half of that time, so found within one and a half, and not before it; a
        # machine that computes other things, too, may be late to ask.
        assert HANG_SECONDS / 2 < time.monotonic() - start < 4 * HANG_SECONDS
        assert "has not answered for" in openai_error(client.get("/health"))["message"]
    finally:
        engine.resume()
    wait_for(lambda: client.get("/health").status_code == 200)
    assert client.post("/v1/completions", json={**COMPLETION, "max_tokens": 2}).status_code == 200


def test_sigterm_finishes_a_running_stream_and_exits_with_0(server, client, openai_error):
    body = {**COMPLETION, "max_tokens": 400, "ignore_eos": True}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    started = threading.Event()

    def read():
        with (
            server.client() as reader,
            reader.stream("POST", "/v1/completions", json=body) as answer,
        ):
            lines = []
            for line in answer.iter_lines():
                lines.append(line)
                if len(lines) == 8:
                    started.set()
            return [line for line in lines if line]

    with ThreadPoolExecutor(1) as pool:
        stream = pool.submit(read)
        assert started.wait(30)
        server.process.terminate()
        wait_for(lambda: client.get("/health").status_code == 503)
        refused = client.post("/v1/completions", json=COMPLETION)
        assert openai_error(refused)["code"] == 503
        assert info(client)["server"]["draining"]
        lines = stream.result(60)
    assert lines[-1] == "data: [DONE]"
    assert json.loads(lines[-2].removeprefix("data: "))["usage"]["completion_tokens"] == 400
    assert server.wait_exit() == 0
    assert "Traceback" not in server.log.read_text()
