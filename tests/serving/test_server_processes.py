# SPDX-License-Identifier: Apache-2.0
"""Real servers of two HTTP processes: one limit, one count, one drain, and nothing left of them."""

import json
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from tests.serving.server_process import STOP_SECONDS, ServerProcess

pytestmark = pytest.mark.engine

PROCESSES, LIMIT = 2, 3
# Of an answer that outlasts what a test does beside it. With two cores vLLM may compute one request
# after another.
LONG = 8000
BODY = {"model": "demo", "prompt": [1, 2, 3], "ignore_eos": True}
TWO_ENGINES = [
    *("--data-parallel-size", "2", "--load-format", "dummy"),
    # vLLM has no experts for data parallelism on a CPU.
    *("--hf-overrides", '{"first_k_dense_replace": 99, "n_routed_experts": 0}'),
]


@pytest.fixture(scope="module")
def start(demo_checkpoint, tmp_path_factory):
    def start(*more):
        return ServerProcess(
            str(demo_checkpoint("v3")),
            *("--served-model-name", "demo", "--dtype", "float32", "--enforce-eager"),
            *("--max-model-len", "8192", "--kv-cache-memory-bytes", "256M"),
            *("--api-server-count", str(PROCESSES), *more),
            key="test-key",
            log=tmp_path_factory.mktemp("server") / "log",
        )

    return start


@pytest.fixture(scope="module")
def two_engines(start):
    with start("--mla-max-requests", str(LIMIT), *TWO_ENGINES) as server:
        yield server


@pytest.fixture
def one_engine(start):
    with start("--mla-drain-timeout", "60") as server:
        yield server


@pytest.fixture
def each(two_engines):
    """A client of each of the HTTP processes."""
    with ExitStack() as stack:
        found = {}
        for _ in range(20):  # the kernel, and their loads, decide who takes a connection
            client = stack.enter_context(two_engines.client())
            found.setdefault(process_of(two_engines, client), client)
            if len(found) == PROCESSES:
                break
        assert len(found) == PROCESSES
        yield list(found.values())


def process_of(server, client):
    """The process that has this client's connection: its access log says so."""
    stream = client.get("/health").extensions["network_stream"]
    port = stream.get_extra_info("client_addr")[1]
    line = rf"\((ApiServer_\d) pid=\d+\).* 127\.0\.0\.1:{port} - \"GET /health"
    for _ in range(100):
        if found := re.search(line, server.log.read_text()):
            return found[1]
        time.sleep(0.05)
    pytest.fail(f"no line of the request from port {port}")


def info(client):
    return client.get("/mla/info").json()


def until(client, true_of):
    """What `/mla/info` says once it is so, or after a minute."""
    deadline = time.monotonic() + 60
    while not true_of(said := info(client)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return said


def total_requests(said):
    return said["requests"]["running"] + said["requests"]["waiting"]


def stream(server, begun, max_tokens):
    """The lines of a stream; `begun` once it has an answer, that is when it was counted."""
    body = {**BODY, "max_tokens": max_tokens, "stream": True}
    lines: list[str] = []
    with server.client() as client, client.stream("POST", "/v1/completions", json=body) as answer:
        begun.set()
        lines.extend(answer.iter_lines())
    return [line for line in lines if line]


def family(server):
    """The server's process and all that it started."""
    parent = psutil.Process(server.process.pid)
    return [parent, *parent.children(recursive=True)]


def named(processes, title):
    return [process for process in processes if title in " ".join(process.cmdline())]


def assert_nothing_is_left(processes):
    _, left = psutil.wait_procs(processes, timeout=20)
    assert [p for p in left if p.status() != psutil.STATUS_ZOMBIE] == []


def metrics_folder(process):
    """Where it counts: prometheus_client has a file of each kind mapped there."""
    return Path(next(m.path for m in process.memory_maps() if m.path.endswith(".db"))).parent


def total(text, name):
    values = re.findall(rf"^{name}(?:\{{[^}}]*\}})? ([0-9.e+]+)$", text, re.MULTILINE)
    return sum(map(float, values))


def test_the_start_is_that_of_one_server(two_engines):
    while "\n  curl " not in (log := two_engines.log.read_text()):  # it answers a moment before
        time.sleep(0.05)
    said = re.findall(r"^mla-backend \[.*\] (?!still)(.*)$", log, re.MULTILINE)
    starts = ["importing vLLM", "loading ", "computing a first answer", "ready: demo at http"]
    assert [line[: len(start)] for line, start in zip(said, starts, strict=True)] == starts
    assert said[1].endswith(", with 2 HTTP processes")
    assert log.count("/v1/chat/completions") == 1  # what to try


def test_the_first_answers_are_computed_once(two_engines):
    with two_engines.client() as client:
        workers = info(client)["attention"]["workers"]
        text = client.get("/metrics").text
    assert [worker["engine"] for worker in workers] == [0, 1]
    assert all(worker["forward_mqa_calls"] for worker in workers)
    assert total(text, "vllm:request_success_total") == len(workers)


def test_the_limit_and_the_counts_are_those_of_the_server(two_engines, each):
    before = [info(client)["server"]["refused"] for client in each]
    assert before == [before[0]] * PROCESSES
    asked = {**BODY, "max_tokens": LONG, "stream": True}
    # Whoever got in stays in until all have been answered and the counts were read.
    answered, read = threading.Barrier(8 + 1), threading.Event()

    def ask(client):
        with client.stream("POST", "/v1/completions", json=asked) as answer:
            answered.wait(60)
            assert read.wait(60)
            return answer.status_code

    with ExitStack() as stack:
        stack.callback(read.set)  # so that no thread is left when this test fails
        pool = stack.enter_context(ThreadPoolExecutor(8))
        clients = [stack.enter_context(two_engines.client()) for _ in range(8)]
        answers = [pool.submit(ask, client) for client in clients]
        answered.wait(60)
        counted = [until(client, lambda i: total_requests(i) == LIMIT) for client in each]
        read.set()
        statuses = sorted(answer.result() for answer in answers)
    assert statuses == [200] * LIMIT + [429] * (8 - LIMIT)
    for counts in counted:  # also when asked of the other process
        assert counts["server"]["http_requests"] == total_requests(counts) == LIMIT
    after = {"draining": False, "http_requests": 0, "refused": before[0] + 8 - LIMIT}
    for client in each:  # a stream that is left is aborted a moment later
        assert until(client, lambda i: i["server"] == after)["server"] == after


def test_metrics_are_those_of_the_server(each):
    def counted():
        text = each[0].get("/metrics").text
        return (
            total(text, r"mla_http_answers_total\{status=\"404\"\}"),
            total(text, "vllm:generation_tokens_total"),
        )

    missed, tokens = counted()
    for client in each:
        assert client.get("/v1/nothing").status_code == 404
        answer = client.post("/v1/completions", json={**BODY, "max_tokens": 5})
        assert answer.json()["usage"]["completion_tokens"] == 5
    assert counted() == (missed + PROCESSES, tokens + 5 * PROCESSES)


def test_each_asks_for_the_key(two_engines, each):
    for client in each:
        assert client.get("/mla/info", headers={"Authorization": "Bearer x"}).status_code == 401


def test_one_that_is_killed_ends_the_server(two_engines):
    """The last test of this server."""
    processes = family(two_engines)
    assert len(named(processes, "EngineCore")) == 2
    first, second = named(processes, "APIServer")
    folder = metrics_folder(first)
    assert folder.is_dir()
    begun = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(stream, two_engines, begun, LONG)
        assert begun.wait(30)
        second.kill()
        assert two_engines.process.wait(STOP_SECONDS) == 1
        running.exception(30)  # cut off, by whichever process it was
    assert_nothing_is_left(processes)
    log = two_engines.log.read_text()
    said = f"the process ApiServer_1 ({second.pid}) was ended by SIGKILL\n"
    assert log.count(said) == 1 and "Traceback" not in log
    assert not folder.exists()


def test_a_signal_lets_all_of_them_finish(one_engine, openai_error):
    server, processes = one_engine, family(one_engine)
    folder = metrics_folder(named(processes, "APIServer")[0])
    begun = [threading.Event() for _ in range(4)]
    with ThreadPoolExecutor(len(begun)) as pool:
        streams = [pool.submit(stream, server, event, 400) for event in begun]
        assert all(event.wait(30) for event in begun)
        with server.client() as client, server.client() as other:
            server.process.terminate()
            for one in (client, other):
                for _ in range(100):
                    if one.get("/health").status_code == 503:
                        break
                    time.sleep(0.02)
                refused = one.post("/v1/completions", json=BODY)
                assert openai_error(refused)["code"] == 503
                assert info(one)["server"]["draining"]
        for lines in [running.result(120) for running in streams]:
            assert lines[-1] == "data: [DONE]"
            assert json.loads(lines[-2].removeprefix("data: "))["choices"][0]["finish_reason"]
    assert server.wait_exit() == 0
    assert_nothing_is_left(processes)
    assert not folder.exists()
    log = server.log.read_text()
    assert "stopping: running requests (4)" in log and "stopped\n" in log
    assert "Traceback" not in log and "aborted" not in log


def test_a_second_signal_ends_all_of_them_at_once(one_engine):
    server, processes = one_engine, family(one_engine)
    begun = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(stream, server, begun, LONG)
        assert begun.wait(30)
        server.process.terminate()
        with server.client() as client:
            while client.get("/health").status_code != 503:
                time.sleep(0.02)
        start = time.monotonic()
        server.process.terminate()
        assert server.wait_exit() == 128 + 15
        assert time.monotonic() - start < 10
        assert running.exception(30) is not None
    assert_nothing_is_left(processes)


def test_all_end_with_the_main_process_that_is_killed(one_engine):
    processes = family(one_engine)
    assert len(named(processes, "EngineCore")) == 1
    assert len(named(processes, "APIServer")) == PROCESSES
    one_engine.process.kill()
    one_engine.process.wait(STOP_SECONDS)
    assert_nothing_is_left(processes)
