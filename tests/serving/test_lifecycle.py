# SPDX-License-Identifier: Apache-2.0
"""Admission and shutdown over a real socket, with a stand-in for vLLM."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import psutil
import pytest
import uvicorn
from mla_serving.server import lifecycle
from mla_serving.server.admission import Admission, Gate
from mla_serving.server.progress import Progress


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
        await asyncio.wait_for(listening.wait(), 5)
        port = sock.getsockname()[1]
        self.client = httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=10)
        return self

    async def __aexit__(self, *_):
        await self.client.aclose()
        if not self.task.done():
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
        await asyncio.wait_for(first.wait(), 5)
        self.lines = lines
        return task

    def release(self):
        self.stand.vllm_app.state.release.set()


DONE = ["data: 0", "data: 1", "data: 2", "data: [DONE]"]


@pytest.fixture
def no_hang_up(monkeypatch):
    """By default it would end these tests; under nohup the server does not listen to it."""
    monkeypatch.setattr(lifecycle, "_SIGNALS", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_finishes_what_runs_and_takes_nothing_new(stand, openai_error, no_hang_up, number):
    async def run():
        async with Running(stand) as r:
            stream = await r.stream()
            os.kill(os.getpid(), number)
            await asyncio.sleep(0.1)
            assert openai_error(await r.client.get("/health"))["code"] == 503
            refused = await r.client.post("/v1/echo", content=b"x")
            assert openai_error(refused)["code"] == 503
            assert "retry-after" in refused.headers
            assert refused.headers["connection"] == "close"  # for a proxy to go elsewhere
            assert (await r.client.get("/metrics")).status_code == 200
            assert openai_error(await r.client.get("/v1/models"))["code"] == 503
            info = (await r.client.get("/mla/info")).json()["server"]
            assert info == {"draining": True, "http_requests": 1, "refused": 2}
            assert not r.task.done()
            r.release()
            assert await stream == DONE
            assert await r.task == 0
            assert r.stand.engine.stopped
            assert r.stand.events == ["started", "ended"]
            with pytest.raises(httpx.ConnectError):
                await r.client.get("/health")

    asyncio.run(run())


def test_a_server_that_nobody_asked_stops_at_once(stand, capfd):
    async def run():
        async with Running(stand, drain_timeout=60.0) as r:
            os.kill(os.getpid(), signal.SIGTERM)
            assert await asyncio.wait_for(r.task, 20) == 0

    asyncio.run(run())
    assert "aborted" not in capfd.readouterr().out


def test_the_drain_waits_for_every_request(stand):
    """Not until the first of several is done."""

    async def run():
        gate = stand().gate
        gate.enter()
        gate.enter()
        gate.leave()
        assert not await gate.wait_idle(0.01)
        gate.leave()
        assert await gate.wait_idle(0.01)

    asyncio.run(run())


@pytest.mark.parametrize("kind, draining", [("http", False), ("websocket", True)])
def test_a_cancellation_that_is_not_the_drains_is_passed_on(kind, draining):
    """Whoever cancels a request would take it for answered; a websocket is sent no HTTP."""

    async def run():
        gate, sent = Gate(), []

        async def app(scope, receive, send):
            gate.draining = draining
            raise asyncio.CancelledError

        async def send(message):
            sent.append(message)

        scope = {"type": kind, "method": "POST", "path": "/v1/echo", "headers": []}
        with pytest.raises(asyncio.CancelledError):
            await Admission(app, gate)(scope, None, send)
        assert sent == [] and gate.running == 0

    asyncio.run(run())


def test_the_drain_is_bounded(stand, capfd):
    async def run():
        async with Running(stand, drain_timeout=0.3) as r:
            stream = await r.stream()
            start = time.monotonic()
            os.kill(os.getpid(), signal.SIGTERM)
            assert await r.task == 0
            assert 0.3 <= time.monotonic() - start < 4
            with pytest.raises(httpx.RemoteProtocolError):
                await stream
            assert "cancelled" in r.stand.events  # so vLLM aborts it in the engine

    asyncio.run(run())
    assert "not finished in time and aborted: 1" in capfd.readouterr().out


def test_what_the_end_of_the_drain_cuts_short_is_a_503(stand, openai_error, capfd):
    async def run():
        async with Running(stand, drain_timeout=0.3) as r:
            stream = await r.stream()
            waiting = asyncio.create_task(r.client.post("/v1/wait"))
            while r.stand.gate.running < 2:
                await asyncio.sleep(0.01)
            os.kill(os.getpid(), signal.SIGTERM)
            answer = await waiting
            assert openai_error(answer)["code"] == 503
            assert "retry-after" in answer.headers
            with pytest.raises(httpx.RemoteProtocolError):
                await stream
            assert await r.task == 0
            assert r.stand.gate.running == 0

    asyncio.run(run())
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("named", [False, True])
def test_a_stream_that_the_end_of_the_drain_cuts_short_says_so(stand, named):
    async def run():
        async with Running(stand, drain_timeout=0.3) as r:
            stream = await r.stream(f"/v1/stream?named={named}")
            os.kill(os.getpid(), signal.SIGTERM)
            with pytest.raises(httpx.RemoteProtocolError):
                await stream
            *before, event = [line for line in r.lines if line]
            error = json.loads(event.removeprefix("data: "))["error"]
            assert (error["code"], error["message"]) == (503, "The server is shutting down.")
            assert before[-1] == ("event: error" if named else "data: 2")

    asyncio.run(run())


def test_a_stream_that_has_waited_all_the_drain_says_so(stand):
    async def run():
        async with Running(stand, drain_timeout=0.3) as r:
            said, begun = [], asyncio.Event()

            async def read():
                async with r.client.stream("POST", "/v1/stream?events_first=0") as answer:
                    begun.set()
                    async for line in answer.aiter_lines():
                        said.append(line)

            reading = asyncio.create_task(read())
            await asyncio.wait_for(begun.wait(), 5)
            os.kill(os.getpid(), signal.SIGTERM)
            with pytest.raises(httpx.RemoteProtocolError):
                await reading
            assert '"code": 503' in said[0]

    asyncio.run(run())


def test_a_second_signal_ends_at_once(stand, monkeypatch):
    async def run():
        async with Running(stand) as r:
            killed = asyncio.Event()
            monkeypatch.setattr(lifecycle, "kill_everything", killed.set)
            stream = await r.stream()
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(0.1)
            assert not killed.is_set()
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.wait_for(killed.wait(), 1)
            r.release()
            await stream

    asyncio.run(run())


@pytest.mark.parametrize("draining", [False, True])
def test_the_death_of_the_engine_ends_the_server_with_1(stand, monkeypatch, draining):
    monkeypatch.setattr(lifecycle, "_ENGINE_CHECK_SECONDS", 0.05)

    async def run():
        async with Running(stand, drain_timeout=60) as r:
            stream = await r.stream()
            if draining:
                os.kill(os.getpid(), signal.SIGTERM)
                await asyncio.sleep(0.1)
            r.stand.engine.errored = True
            assert (await r.client.get("/health")).status_code == 503
            assert await asyncio.wait_for(r.task, 5) == 1
            stream.cancel()

    asyncio.run(run())


def test_admission_limit(stand, openai_error):
    async def run():
        async with Running(stand, limit=2) as r:
            streams = [await r.stream(), await r.stream()]
            refused = await r.client.post("/v1/echo", content=b"x")
            assert openai_error(refused)["code"] == 429
            assert refused.headers["retry-after"] == "1"
            for path in ("/health", "/metrics", "/v1/nothing"):  # what is only read is not limited
                assert (await r.client.get(path)).status_code != 429
            assert (await r.client.get("/mla/info")).json()["server"]["http_requests"] == 2
            r.release()
            assert [await s for s in streams] == [DONE, DONE]
            assert (await r.client.post("/v1/echo", content=b"x")).status_code == 200
            assert r.stand.gate.running == 0

    asyncio.run(run())


def test_a_client_that_leaves_is_no_longer_counted(stand):
    async def run():
        async with Running(stand) as r:
            stream = await r.stream()
            assert r.stand.gate.running == 1
            stream.cancel()
            for _ in range(100):
                if r.stand.gate.running == 0:
                    break
                await asyncio.sleep(0.02)
            assert r.stand.gate.running == 0

    asyncio.run(run())


@pytest.mark.parametrize("own", [False, True])
def test_a_crash_takes_no_other_request_of_its_connection_along(stand, monkeypatch, own, capfd):
    async def run():
        async with Running(stand) as r:
            if own:  # a route of ours instead of vLLM's
                monkeypatch.setattr(r.stand.engine, "vllm_config", None)
            path = b"GET /mla/info" if own else b"POST /v1/fail?how=crash"
            host = r.client.base_url
            reader, writer = await asyncio.open_connection(host.host, host.port)
            writer.write(path + b" HTTP/1.1\r\nHost: x\r\n\r\n")
            writer.write(b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            answers = await asyncio.wait_for(reader.read(), 5)
            assert answers.startswith(b"HTTP/1.1 500 ")
            assert answers.endswith(b'{"from":"vllm"}')
            writer.close()

    asyncio.run(run())
    assert capfd.readouterr().err.count("Exception in ASGI application") == 1


def test_a_crash_amid_an_answer_shows(stand):
    async def run():
        async with Running(stand) as r:
            with pytest.raises(httpx.RemoteProtocolError):
                await r.client.post("/v1/fail?how=amid")

    asyncio.run(run())


def test_a_start_that_swallows_its_signal_ends_all_the_same():
    code = """
import os, signal, subprocess, time
from mla_serving.server import lifecycle
lifecycle._START_STOP_SECONDS = 0.3
lifecycle.catch_signals_while_starting()
child = subprocess.Popen(["sleep", "60"])
print(child.pid, flush=True)
class Swallows:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.1)
Swallows()
time.sleep(60)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert "Exception ignored in" in done.stderr and "StopRequested" in done.stderr
    assert done.returncode == 128 + signal.SIGTERM
    for _ in range(100):
        if has_ended(int(done.stdout)):
            break
        time.sleep(0.05)
    else:
        pytest.fail("the child still runs")


HANG_UP = """
import os, signal, subprocess, time
from multiprocessing import resource_tracker
from mla_serving.server import lifecycle
lifecycle.catch_signals_while_starting()
child = subprocess.Popen(["sleep", "60"])
for number, seconds in SENT:
    try:
        for pid in (os.getpid(), child.pid, resource_tracker._resource_tracker._pid):
            if number == signal.SIGHUP or pid == os.getpid():
                os.kill(pid, number)
        time.sleep(seconds)
        print("goes on")
    except lifecycle.StopRequested:
        print("told to stop")
assert child.poll() is None
os.kill(resource_tracker._resource_tracker._pid, 0)
child.kill()
"""
# These tests may run under nohup.
LISTENS = "import signal\nsignal.signal(signal.SIGHUP, signal.SIG_DFL)\n"


@pytest.mark.parametrize("first", [signal.SIGHUP, signal.SIGTERM])
def test_a_terminal_that_goes_is_one_signal_and_only_to_the_server(first):
    sent = f"SENT = [({first:d}, 20), ({signal.SIGHUP:d}, 0.5)]"
    run = [sys.executable, "-c", LISTENS + sent + HANG_UP]
    done = subprocess.run(run, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "told to stop\ngoes on\n"), done.stderr


def test_a_terminal_that_goes_while_the_server_drains():
    """It was stopped from elsewhere; what runs is not cut short."""
    code = """
import asyncio, os, socket, sys
from types import SimpleNamespace
import uvicorn
from mla_serving.server import lifecycle
from mla_serving.server.admission import Gate
from mla_serving.server.progress import Progress

async def run():
    gate = Gate()
    gate.enter()
    server = lifecycle.Server(
        uvicorn.Config(None, lifespan="off"), lambda: os.kill(os.getpid(), signal.SIGTERM)
    )
    engine = SimpleNamespace(errored=False, shutdown=lambda timeout: None)
    sock = socket.create_server(("127.0.0.1", 0))
    serving = lifecycle.run_until_stopped(server, sock, engine, gate, 60, Progress())
    serving = asyncio.create_task(serving)
    while not gate.draining:
        await asyncio.sleep(0.01)
    os.kill(os.getpid(), signal.SIGHUP)
    await asyncio.sleep(0.5)
    gate.leave()
    return await serving

lifecycle.catch_signals_while_starting()
sys.exit(asyncio.run(run()))
"""
    run = [sys.executable, "-c", LISTENS + code]
    done = subprocess.run(run, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "aborted" not in done.stdout


def test_nohup_is_respected():
    sent = f"SENT = [({signal.SIGHUP:d}, 0.5)] * 2"
    run = ["sh", "-c", "trap '' HUP; exec \"$@\"", "sh", sys.executable, "-c", sent + HANG_UP]
    done = subprocess.run(run, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "goes on\n" * 2), done.stderr


def test_nobody_who_reads_the_lines_is_no_failure():
    """`mla-backend serve | tee log`: Ctrl-C ends tee first."""
    code = """
import sys
from mla_serving.server.progress import Progress
sys.stdin.read()
for _ in range(2):
    Progress().line("stopping")
"""
    run = [sys.executable, "-c", code]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(run, **pipes) as process:
        process.stdout.close()
        process.stdin.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0


def test_a_line_that_cannot_be_written_is_the_only_one_lost(tmp_path):
    """As on a disk that is full for a while; at the end it is full again."""
    code = """
import resource
from mla_serving.server.progress import say
hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
for text, size in (("first", 6), ("second", 6), ("third", 12), ("fourth", 12)):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    say(text)
"""
    buffered = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
    run = [sys.executable, "-c", code]
    with (tmp_path / "log").open("wb") as log:
        done = subprocess.run(run, stdout=log, stderr=subprocess.PIPE, text=True, env=buffered)
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "log").read_text() == "first\nthird\n"


def test_shared_memory_does_not_outlive_what_is_killed():
    code = """
import multiprocessing, time
from multiprocessing.shared_memory import SharedMemory
from mla_serving.server import lifecycle

def work(pipe):
    pipe.send(SharedMemory(create=True, size=64).name)
    time.sleep(60)

if __name__ == "__main__":
    lifecycle.catch_signals_while_starting()
    ours, theirs = multiprocessing.Pipe()
    child = multiprocessing.get_context("fork").Process(target=work, args=(theirs,))
    child.start()
    print(child.pid, ours.recv(), SharedMemory(create=True, size=64).name, flush=True)
    lifecycle.kill_everything()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert done.returncode == 128 + signal.SIGTERM, done.stderr
    child, *names = done.stdout.split()
    for _ in range(100):
        left = [name for name in names if Path("/dev/shm", name).exists()]
        if has_ended(int(child)) and not left:
            break
        time.sleep(0.05)
    else:
        pytest.fail(f"the child still runs, or shared memory is left: {left}")


def test_vllm_does_not_swallow_a_signal_while_its_engine_loads(tmp_path):
    code = f"""
import os, signal, sys, time, zmq
from mla_serving.server import lifecycle
from vllm.utils.network_utils import zmq_socket_ctx
lifecycle.catch_signals_while_starting()
try:
    with zmq_socket_ctx("ipc://{tmp_path}/engine", zmq.ROUTER, bind=True):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)
except lifecycle.StopRequested:
    print("told to stop")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "told to stop\n"), done.stderr


def has_ended(pid):
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE  # where nobody reaps orphans
    except psutil.NoSuchProcess:
        return True
