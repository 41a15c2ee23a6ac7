# SPDX-License-Identifier: Apache-2.0
"""Who watches and ends several HTTP processes, with stand-ins for them and their engines."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import psutil
import pytest
from mla_serving.server import lifecycle
from mla_serving.server.progress import Progress
from mla_serving.server.worker import ENGINE_DIED, LISTENING, LOADED, WARM, Shared

from tests.serving.running_app import WAIT_SECONDS


class Process:
    """What is read of a multiprocessing.Process; SIGTERM ends it with 0."""

    def __init__(self, name, pid):
        self.name, self.pid, self.exitcode = name, pid, None

    def terminate(self):
        if self.exitcode is None:
            self.exitcode = 0


class Manager:
    """Of engines: says that one has ended when `ended` is set."""

    def __init__(self):
        self.ended = threading.Event()
        self.stop_seconds = None

    def monitor_engine_liveness(self):
        self.ended.wait(WAIT_SECONDS)

    def shutdown(self, timeout):
        self.stop_seconds = timeout


class Server:
    def __init__(self, connector=None, dp=True):
        from mla_serving.server.processes import Engines, Workers

        self.shared, self.manager, self.said = Shared(0, 2), Manager(), []
        self.shared.steps[:] = [LISTENING] * 2
        self.processes = [Process(f"ApiServer_{i}", 1000 + i) for i in range(2)]
        self.dp = None
        if dp:
            proc, stops = Process("Coordinator", 2000), []
            self.dp = SimpleNamespace(proc=proc, stops=stops)
            self.dp.shutdown = lambda timeout: stops.append(timeout)
        config = SimpleNamespace(kv_transfer_config=connector)
        self.engines = Engines(self.manager, self.dp, config)
        self.workers = Workers(
            *(self.processes, self.dp, self.engines, self.shared, Progress()),
            on_listening=lambda: self.said.append("ready"),
        )

    def run(self, while_it_runs, drain=60.0):
        """The exit status of a server for which `while_it_runs` decides when it is to end."""

        async def run():
            gate = self.shared.gate
            serving = asyncio.create_task(
                lifecycle.run_until_stopped(
                    self.workers, None, self.engines, gate, drain, Progress()
                )
            )
            await asyncio.sleep(0.1)
            await while_it_runs(self)
            return await asyncio.wait_for(serving, WAIT_SECONDS)

        return asyncio.run(run()) or int(self.workers.failed)


@pytest.fixture(autouse=True)
def check_often(monkeypatch):
    monkeypatch.setattr(lifecycle, "_ENGINE_CHECK_SECONDS", 0.05)


async def ask_to_stop(server):
    os.kill(os.getpid(), signal.SIGTERM)


def test_a_signal_ends_them_when_all_requests_are_answered(capfd):
    server = Server()
    server.shared.gate.enter()

    async def ask(server):
        await ask_to_stop(server)
        await asyncio.sleep(0.3)
        assert server.shared.gate.draining
        assert [process.exitcode for process in server.processes] == [None, None]
        server.shared.gate.leave()

    assert server.run(ask) == 0
    assert [process.exitcode for process in server.processes] == [0, 0]
    (left,) = server.dp.stops
    assert server.manager.stop_seconds == 10 and left == pytest.approx(10, abs=1)
    said = capfd.readouterr().out
    assert "stopping: running requests (1) have 60 s" in said and "aborted" not in said


def test_it_is_ready_when_all_of_them_listen():
    server = Server()
    server.shared.steps[1] = WARM
    assert not server.shared.listen.value

    async def start_late(server):
        assert server.shared.listen.value and server.said == []
        server.shared.steps[1] = LISTENING
        await asyncio.sleep(0.3)
        assert server.said == ["ready"]
        await ask_to_stop(server)

    assert server.run(start_late) == 0
    assert server.said == ["ready"]


def test_a_signal_between_the_first_that_listens_and_the_last_is_heard():
    """It answers by then, so requests may run: nothing is cut off, as a start would be."""
    server = Server()
    server.shared.steps[1] = WARM
    server.shared.gate.enter()

    async def ask(server):
        await ask_to_stop(server)
        await asyncio.sleep(0.3)
        assert [process.exitcode for process in server.processes] == [None, None]
        server.shared.gate.leave()

    assert server.run(ask) == 0
    assert server.said == []


def test_one_that_ends_before_it_listens_is_a_failed_start():
    server = Server()
    server.shared.steps[1] = WARM

    async def end(server):
        server.processes[1].exitcode = 1

    with pytest.raises(RuntimeError, match=r"ApiServer_1 \(1001\) has ended with status 1"):
        server.run(end)
    assert server.said == []


@pytest.mark.parametrize("connector", [None, "NixlConnector"])
def test_blocks_that_are_handed_over_have_the_rest_of_the_drain(connector):
    server = Server(connector)
    assert server.run(ask_to_stop) == 0
    assert (server.manager.stop_seconds > 30) is (connector is not None)


@pytest.mark.parametrize("draining", [False, True])
@pytest.mark.parametrize(
    ("which", "status", "said"),
    [
        (1, -9, "the process ApiServer_1 (1001) was ended by SIGKILL"),
        (0, 1, "the process ApiServer_0 (1000) has ended with status 1"),
        (0, 0, "the process ApiServer_0 (1000) has ended with status 0"),
        (None, -9, "the process Coordinator (2000) was ended by SIGKILL"),
    ],
)
def test_one_that_ends_by_itself_ends_the_server_with_1(draining, which, status, said, capfd):
    server = Server()
    server.shared.gate.enter()  # by who is gone, so that nobody leaves

    async def end(server):
        if draining:
            await ask_to_stop(server)
            await asyncio.sleep(0.1)
        process = server.dp.proc if which is None else server.processes[which]
        process.exitcode = status

    start = time.monotonic()
    assert server.run(end) == 1
    assert time.monotonic() - start < 30  # and not only when the drain is over
    assert all(process.exitcode is not None for process in server.processes)
    assert server.shared.gate.draining and server.manager.stop_seconds == 10
    out = capfd.readouterr().out
    assert out.count(said) == 1 and "the engine has died" not in out


@pytest.mark.parametrize("first", ["parent", "process"])
def test_the_end_of_an_engine_is_said_as_such(first, capfd):
    """Whoever hears of it first."""
    server = Server(dp=False)

    async def end(server):
        if first == "parent":
            server.manager.ended.set()
        else:
            server.processes[1].exitcode = ENGINE_DIED

    assert server.run(end) == 1
    assert all(process.exitcode is not None for process in server.processes)
    out = capfd.readouterr().out
    assert "the engine has died" in out and "ApiServer" not in out


def test_one_that_does_not_end_is_killed(monkeypatch):
    from mla_serving.server import processes

    monkeypatch.setattr(processes, "_STOP_SECONDS", 0.2)
    server, killed = Server(), []
    server.processes[1].terminate = lambda: None

    def kill(pids):
        killed.extend(pids)
        server.processes[1].exitcode = -9

    monkeypatch.setattr(lifecycle, "kill", kill)
    assert server.run(ask_to_stop) == 0
    assert 1001 in killed


def test_a_start_waits_for_all_and_ends_with_any():
    server = Server()
    server.shared.steps[:] = [LOADED, 0]
    threading.Timer(0.2, server.shared.steps.__setitem__, (1, LOADED)).start()
    server.workers.wait_for(LOADED)
    assert server.shared.steps[1] == LOADED
    server.processes[1].exitcode = 1
    with pytest.raises(RuntimeError, match=r"ApiServer_1 .* has ended with status 1"):
        server.workers.wait_for(LOADED + 1)
    server = Server()
    server.shared.steps[1] = 0
    server.manager.ended.set()
    with pytest.raises(RuntimeError, match="an engine has died"):
        server.workers.wait_for(LOADED)


def test_a_parent_that_is_killed_takes_all_along(tmp_path):
    """Its HTTP processes end the engines, and what these have started."""
    code = """
import multiprocessing, subprocess, sys, time

def work(others):
    from mla_serving.server.worker import _end_with_parent
    _end_with_parent(others)
    print("watches", flush=True)
    time.sleep(60)

if __name__ == "__main__":
    engine = subprocess.Popen(["sh", "-c", "sleep 60 & wait"])
    context = multiprocessing.get_context("spawn")
    worker = context.Process(target=work, args=([engine.pid],))
    worker.start()
    print(engine.pid, worker.pid, flush=True)
    time.sleep(60)
"""
    script = tmp_path / "parent.py"  # where the process that it spawns finds its function
    script.write_text(code)
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True) as run:
        pids = map(int, run.stdout.readline().split())
        assert run.stdout.readline() == "watches\n"
        processes = [psutil.Process(pid) for pid in pids]
        processes += processes[0].children()
        assert len(processes) == 3
        run.kill()
        _, left = psutil.wait_procs(processes, timeout=20)
    left = [process for process in left if process.status() != psutil.STATUS_ZOMBIE]
    for process in left:
        process.kill()
    assert not left


def test_lines_of_a_process_are_recognisable():
    from mla_serving.server import http

    formats = [f["fmt"] for f in http._named("ApiServer_1 pid=7")["formatters"].values()]
    assert formats and all(fmt.startswith("(ApiServer_1 pid=7) %(levelprefix)s") for fmt in formats)
    import uvicorn

    assert "ApiServer" not in str(uvicorn.config.LOGGING_CONFIG)


@pytest.mark.parametrize("users", [False, True])
def test_lines_of_a_process_are_recognisable_without_those_of_some_paths(
    users, monkeypatch, tmp_path
):
    """Of a log that the user has configured nothing is changed."""
    import uvicorn
    from mla_serving.server import args as server_args
    from mla_serving.server import http

    monkeypatch.setattr(uvicorn.Config, "configure_logging", lambda _: None)
    args = server_args._parse(
        server_args.make_parser(), ["m", "--disable-access-log-for-endpoints", "/health"]
    )
    if users:
        file = tmp_path / "log.json"
        file.write_text(json.dumps(uvicorn.config.LOGGING_CONFIG))
        args.logging_config = None  # vLLM 0.32 has both
        args.log_config_file = str(file)
    server = http.make_server(None, args, lambda: None, process="ApiServer_1")
    formats = [f["fmt"] for f in server.config.log_config["formatters"].values()]
    assert formats and all(fmt.startswith("(ApiServer_1) ") is not users for fmt in formats)
    assert ("filters" in server.config.log_config) is not users


def test_json_lines_of_a_process_stay_json():
    from mla_serving.server import http

    config = {"formatters": {"default": {"class": "x.JsonFormatter", "format": "%(message)s"}}}
    assert http._named("ApiServer_1", config) == config


def test_the_coordinator_has_the_time_that_the_engines_leave():
    server = Server()
    server.manager.shutdown = lambda timeout: time.sleep(0.3)
    server.engines.shutdown(0.4)
    (left,) = server.dp.stops
    assert 0 <= left <= 0.1
    server.engines.shutdown(0.1)
    assert server.dp.stops[1] == 0


def test_gauges_of_several_processes_are_read_from_their_files_alone(tmp_path):
    """And those of one are its own, whoever else writes to the folder."""
    script = """
import sys
from prometheus_client import Counter, Gauge
gauge = Gauge("vllm:num_requests_running", "-", ["engine"], multiprocess_mode="mostrecent")
Counter("vllm:num_requests_waiting", "-").inc()  # no gauge: its file is not read
for engine, value in enumerate(sys.argv[1:]):
    gauge.labels(engine).set(float(value))
from mla_serving.server.vllm_api import engine_gauges
print(sorted(engine_gauges(1).get("vllm:num_requests_running", [])))
print(sorted(engine_gauges(2)["vllm:num_requests_running"]), len(engine_gauges(2)))
"""
    env = os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    said = []
    for values in (["3", "4"], ["5"]):
        command = [sys.executable, "-c", script, *values]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
        said += done.stdout.splitlines()[-2:]
    assert said == ["[3.0, 4.0]", "[3.0, 4.0] 1", "[5.0]", "[4.0, 5.0] 1"]


@pytest.mark.parametrize("gone", ["of the module", "of the function"])
def test_a_launcher_of_vllms_that_takes_other_names_is_refused(gone, monkeypatch):
    """Not run with a socket or a worker of its own."""
    from mla_serving.server import vllm_api

    ran = []

    def of_the_module(args):
        ran.append((setup_server, launch_core_engines, APIServerProcessManager))  # noqa: F821
        ran.append((wait_for_completion_or_failure, signal))  # noqa: F821

    def of_the_function(args):
        ran.append((setup_server, launch_core_engines, APIServerProcessManager))  # noqa: F821
        ran.append(wait_for_completion_or_failure)  # noqa: F821

    names = ["setup_server", "launch_core_engines", "APIServerProcessManager", "signal"]
    module = SimpleNamespace(**dict.fromkeys(names), wait_for_completion_or_failure=None)
    if gone == "of the module":
        del module.signal
    module.run_multi_api_server = of_the_module if gone == "of the module" else of_the_function
    monkeypatch.setattr(vllm_api.importlib, "import_module", lambda name: module)
    with pytest.raises(ImportError, match=r"starts no HTTP processes by \['signal'\]"):
        vllm_api.run_api_servers(SimpleNamespace(), None, None, None)
    assert not ran
