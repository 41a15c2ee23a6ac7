# SPDX-License-Identifier: Apache-2.0
"""How a server ends: the drain, its bound, and the death of the engine."""

import asyncio
import gc
import json
import os
import signal
import socket
import time

import httpx
import pytest
from mla_serving.server import lifecycle
from mla_serving.server.admission import Admission, Gate

from tests.serving.running_app import DONE, WAIT_SECONDS, Running


@pytest.fixture
def no_hang_up(monkeypatch):
    """By default it would end these tests; under nohup the server does not listen to it."""
    monkeypatch.setattr(lifecycle, "_SIGNALS", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_finishes_what_runs_and_takes_nothing_new(
    stand, openai_error, no_hang_up, number, shared
):
    async def run():
        async with Running(stand, shared=shared) as r:
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


@pytest.mark.parametrize("shared", [False, True])
def test_paused_requests_can_be_resumed_during_the_drain(stand, openai_error, shared):
    """Which does not wait for whoever resumes: /wake_up never answers here."""

    async def run():
        async with Running(stand, drain_timeout=60.0, shared=shared) as r:
            stream = await r.stream()
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(0.1)
            assert openai_error(await r.client.post("/pause"))["code"] == 503
            assert openai_error(await r.client.get("/resume"))["code"] == 503
            waking = asyncio.create_task(r.client.post("/wake_up"))
            await asyncio.sleep(0.1)
            assert r.stand.gate.running == 1
            assert (await r.client.post("/resume")).status_code == 200
            assert await stream == DONE
            assert await asyncio.wait_for(r.task, 20) == 0
            assert openai_error(await waking)["code"] == 503
            assert r.stand.gate.running == 0

    asyncio.run(run())


def test_a_server_that_nobody_asked_stops_at_once(stand, capfd):
    async def run():
        async with Running(stand, drain_timeout=60.0) as r:
            os.kill(os.getpid(), signal.SIGTERM)
            assert await asyncio.wait_for(r.task, 20) == 0

    asyncio.run(run())
    assert "aborted" not in capfd.readouterr().out


@pytest.mark.parametrize("connector", [None, "NixlConnector"])
@pytest.mark.parametrize("drain, died", [(0.2, False), (60.0, False), (60.0, True)])
def test_blocks_that_a_connector_hands_over_have_the_rest_of_the_drain(
    stand, connector, drain, died
):
    """But not less than any engine has to end."""

    async def run():
        async with Running(stand, drain_timeout=drain, kv_transfer=connector) as r:
            r.stand.engine.errored = died
            os.kill(os.getpid(), signal.SIGTERM)
            assert await asyncio.wait_for(r.task, 20) == died
        return r.stand.engine.stop_seconds

    seconds = asyncio.run(run())
    if connector is None or drain < 10 or died:
        assert seconds == 10
    else:
        assert 30 < seconds < 60


@pytest.mark.parametrize("shared", [False, True])
def test_the_drain_waits_for_every_request(stand, shared):
    """Not until the first of several is done."""

    async def run():
        gate = stand(shared=shared).gate
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


@pytest.mark.parametrize("shared", [False, True])
def test_the_drain_is_bounded(stand, capfd, shared):
    async def run():
        async with Running(stand, drain_timeout=0.3, shared=shared) as r:
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


def test_what_computes_in_a_task_of_its_own_is_cancelled_too(stand, openai_error):
    """vLLM aborts a request without a stream in the engine when its client leaves, and nobody hears
    of what else would become of it. What listens for that reads what its application's end took."""

    async def run():
        failed = []
        asyncio.get_running_loop().set_exception_handler(lambda _, what: failed.append(what))
        async with Running(stand, drain_timeout=0.3) as r:
            waiting = asyncio.create_task(r.client.post("/v1/heeded"))
            while r.stand.gate.running < 1:
                await asyncio.sleep(0.01)
            os.kill(os.getpid(), signal.SIGTERM)
            assert openai_error(await waiting)["code"] == 503
            assert await r.task == 0
            assert sorted(r.stand.events) == ["cancelled", "ended", "left, load 0", "started"]
            assert r.stand.gate.running == 0
        gc.collect()  # a failure that nobody asked for is said then
        assert failed == []

    asyncio.run(run())


def test_a_client_that_reads_nothing_does_not_keep_the_server(stand, capfd):
    async def run():
        async with Running(stand, drain_timeout=0.3) as r:
            stream = f"POST /v1/stream?events_first={10**6} HTTP/1.1\r\nHost: x\r\n\r\n"
            with socket.create_connection(r.client.base_url.netloc.decode().split(":")) as stalled:
                stalled.sendall(stream.encode())
                (connection,) = await first(lambda: r.server.server_state.connections)
                await first(lambda: connection.flow.write_paused)
                os.kill(os.getpid(), signal.SIGTERM)
                assert await asyncio.wait_for(r.task, WAIT_SECONDS) == 0
            assert r.stand.gate.running == 0

    asyncio.run(run())
    assert "Traceback" not in capfd.readouterr().err


async def first(condition):
    """What `condition` says once it is true of something."""
    deadline = time.monotonic() + WAIT_SECONDS
    while not (found := condition()):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)
    return found


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


@pytest.mark.parametrize("path", ["/v1/stream", "/v1/messages"])
def test_a_stream_that_has_waited_all_the_drain_says_so(stand, path):
    """As an event with a name where the client passes over others, though none has come."""

    async def run():
        async with Running(stand, drain_timeout=0.3) as r:
            said, begun = [], asyncio.Event()

            async def read():
                async with r.client.stream("POST", f"{path}?events_first=0") as answer:
                    begun.set()
                    async for line in answer.aiter_lines():
                        said.append(line)

            reading = asyncio.create_task(read())
            await asyncio.wait_for(begun.wait(), WAIT_SECONDS)
            os.kill(os.getpid(), signal.SIGTERM)
            with pytest.raises(httpx.RemoteProtocolError):
                await reading
            *name, data = [line for line in said if line]
            assert '"code": 503' in data
            assert name == (["event: error"] if path == "/v1/messages" else [])

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
            async with r.stand.client() as client:  # the socket may be closed already
                assert (await client.get("/health")).status_code == 503
            assert await asyncio.wait_for(r.task, 20) == 1
            stream.cancel()

    asyncio.run(run())


def test_a_server_that_was_scaled_away_waits_to_be_removed(stand, monkeypatch):
    """By whoever scaled; its engine has ended as it should."""
    monkeypatch.setattr(lifecycle, "_ENGINE_CHECK_SECONDS", 0.01)

    async def run():
        async with Running(stand) as r:
            r.stand.engine.should_keep_api_server_alive = True
            r.stand.engine.errored = True
            await asyncio.sleep(0.2)
            assert (await r.client.get("/health")).status_code == 200
            os.kill(os.getpid(), signal.SIGTERM)
            assert await asyncio.wait_for(r.task, 20) == 0

    asyncio.run(run())
