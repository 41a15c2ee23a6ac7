# SPDX-License-Identifier: Apache-2.0
"""How servers of benchmarks begin, and how a benchmark ends: nothing of them is left."""

import importlib
import inspect
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize(
    ("name", "measures"),
    [
        ("serve_cpu", "measure"),
        ("extends", "measure"),
        ("serve_load", "run"),
        ("soak", "make_model"),
    ],
)
def test_a_benchmark_with_servers_leaves_by_its_with(
    name, measures, number, signals, monkeypatch, tmp_path
):
    """While it measures a signal is an exception, so that what was entered is left."""
    module = importlib.import_module(name)
    main = importlib.import_module(name.removesuffix("_load")).main

    def told_to_end(*args, **options):
        os.kill(os.getpid(), number)
        time.sleep(10)

    monkeypatch.setattr(module, measures, told_to_end)
    with pytest.raises(SystemExit) as left:
        main(["--results", str(tmp_path)])
    assert left.value.code == 128 + number


# In the place of Python: a server that goes on when it is told to end, or leaves its engine behind.
STUBBORN = "trap '' TERM\nsleep 300 &\nwait\nwait"
CARELESS = "sleep 300 &\nexec sleep 300"


def fake_python(folder, text):
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def tree_of(server):
    """The server's processes, once its child runs."""
    for _ in range(100):
        if len(server.pids) == 2:
            return [psutil.Process(pid) for pid in server.pids]
        time.sleep(0.05)
    raise AssertionError("no child")


def alive(processes):
    return [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.parametrize("text", [STUBBORN, CARELESS])
def test_nothing_of_a_server_is_left(text, tmp_path, monkeypatch):
    import servers

    monkeypatch.setattr(servers, "STOP_SECONDS", 0.5)
    monkeypatch.setattr(servers, "TREE_SECONDS", 0.5)
    monkeypatch.setattr(servers.sys, "executable", fake_python(tmp_path, text))
    with servers.Server("ours", tmp_path, [], tmp_path / "log") as server:
        processes = tree_of(server)
        assert len(alive(processes)) == 2
    psutil.wait_procs(processes, timeout=5)
    assert alive(processes) == []


# In the place of Python: a server that is well half a second after its start.
WELL = f"""sleep 0.5\nexec {sys.executable} -c '
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[-1])), Handler).serve_forever()' "$@"
"""


def test_a_server_says_how_long_it_took(tmp_path, monkeypatch):
    import ports
    import servers

    monkeypatch.setattr(servers.sys, "executable", fake_python(tmp_path, WELL))
    with servers.Server("ours", tmp_path, [], tmp_path / "log") as server:
        seconds = server.wait_ready()
        assert 0.5 < seconds < time.monotonic() - server.started
        # It was chosen before the server had it, so it is none that others are given meanwhile.
        assert ports.FIRST <= server.port < ports.STOP


# In the place of Python: a server that listens, the port is its last word, and never answers.
MUTE = f"""exec {sys.executable} -c '
import socket, sys, time
listening = socket.create_server(("127.0.0.1", int(sys.argv[-1])))
time.sleep(300)' "$@"
"""


def test_kernels_that_a_warm_server_made_ready_are_counted(tmp_path):
    """By the words of vLLM."""
    import servers
    from vllm.utils import jit_monitor

    server = servers.Server.__new__(servers.Server)
    server.log = tmp_path / "log"
    said = "%s %s during inference: %s%s. "
    assert said in inspect.getsource(jit_monitor._handle_jit_event)
    event = "kernel JIT compilation"
    assert f'event="{event}"' in inspect.getsource(jit_monitor._log_triton_jit_compile)
    names = ("_a", "f.<locals>.b", "_a")
    lines = [said % ("Triton", event, name, " (key=_b)") for name in names]
    lines += [said % ("Triton", event, "<unknown>", ""), "Autotuning kernel: _c"]
    server.log.write_text("\n".join(lines))
    assert server.compiled_late() is None
    assert servers.WATCHES in inspect.getsource(jit_monitor.activate)
    server.log.write_text("\n".join([f"Kernel {servers.WATCHES}; ", *lines]))
    assert server.compiled_late() == {"_a": 2, "f.<locals>.b": 1, "<unknown>": 1}


def test_a_server_that_never_answers_is_not_waited_for_forever(tmp_path, monkeypatch, capsys):
    import servers

    monkeypatch.setattr(servers, "START_SECONDS", 3)
    monkeypatch.setattr(servers, "HEALTH_SECONDS", 0.5)
    monkeypatch.setattr(servers.sys, "executable", fake_python(tmp_path, MUTE))
    with (
        servers.Server("ours", tmp_path, [], tmp_path / "log") as server,
        pytest.raises(RuntimeError, match="ours did not start: it was not ready after 3 s"),
    ):
        server.wait_ready()


# In the place of Python: prints what it was given, and ends.
PRINTS = "env"


def test_servers_are_given_nothing_that_one_alone_reads(tmp_path, monkeypatch):
    """And no key, which requests do not have; nor may a proxy stand between."""
    import urllib.request

    import servers

    monkeypatch.setattr(servers.sys, "executable", fake_python(tmp_path, PRINTS))
    monkeypatch.setenv("MLA_SERVE_MAX_NUM_SEQS", "1")
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    monkeypatch.setenv("MLA_BACKEND_FP8_QUERY", "1")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.setenv("no_proxy", "example.org")
    with servers.Server("ours", tmp_path, [], tmp_path / "log") as server:
        server._process.wait(10)
        assert urllib.request.proxy_bypass(server.url.removeprefix("http://"))
    given = (tmp_path / "log").read_text()
    assert "MLA_BACKEND_FP8_QUERY=1" in given and "example.org" in given
    assert "MAX_NUM_SEQS" not in given and "secret" not in given


# In the place of Python: servers whose engine fails. What vLLM logs last names no cause.
LAST = "RuntimeError: Engine core initialization failed. See root cause above."
FAILS = f"""echo 'ValueError: Free memory on device cuda:0'\n%s\necho '{LAST}'\nexit 1"""
PYDANTIC = """echo 'ValidationError: 1 validation error for ModelConfig'
echo '  Value error, length 9 is too large [type=value_error, input_value=ArgsKwargs((), {})]'
echo '    For further information visit https://errors.pydantic.dev'
"""
RAISES = """echo '    raise RuntimeError('\nexit 1"""
NOTES = "printf 'OutOfMemoryError: 2 GiB' > $_MLA_REFUSAL_FILE"


@pytest.mark.parametrize(
    ("between", "cause"),
    [
        ("", "ValueError: Free memory on device cuda:0"),
        ("echo 'mla-backend serve: mla-backend cannot serve it'", "mla-backend cannot serve it"),
        (NOTES, "OutOfMemoryError: 2 GiB"),
        (RAISES, "ValueError: Free memory on device cuda:0"),
        (PYDANTIC, "Value error, length 9 is too large"),
    ],
)
def test_a_server_that_does_not_start_says_the_first_cause(between, cause, tmp_path, monkeypatch):
    import servers

    monkeypatch.setattr(servers.sys, "executable", fake_python(tmp_path, FAILS % between))
    (tmp_path / "FLASHMLA.failure").write_text("that of an earlier run")
    with (
        servers.Server("FLASHMLA", tmp_path, [], tmp_path / "FLASHMLA.log") as server,
        pytest.raises(RuntimeError, match=f"FLASHMLA did not start: .*{cause}$"),
    ):
        server.wait_ready()


def test_a_benchmark_that_is_told_to_end_takes_its_server_along(tmp_path):
    fake = fake_python(tmp_path, CARELESS)
    program = f"""
import sys, time
from pathlib import Path
from unittest.mock import MagicMock
sys.path.insert(0, {str(BENCHMARKS)!r})
import servers
from ending import exit_on_signals
exit_on_signals()
servers.TREE_SECONDS = 0.5
servers.sys.executable = {fake!r}
with servers.Server("ours", Path("m"), [], Path({str(tmp_path / "log")!r})) as server:
    while len(server.pids) < 2:
        time.sleep(0.05)
    print(*server.pids, flush=True)
    time.sleep(300)
"""
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True
    ) as run:
        processes = [psutil.Process(int(pid)) for pid in run.stdout.readline().split()]
        run.terminate()
        assert run.wait(30) == 128 + signal.SIGTERM
    psutil.wait_procs(processes, timeout=5)
    assert alive(processes) == []


def test_nohup_is_respected():
    program = f"""
import os, signal, sys, time
sys.path.insert(0, {str(BENCHMARKS)!r})
from ending import exit_on_signals
exit_on_signals()
os.kill(os.getpid(), signal.SIGHUP)
print("goes on", flush=True)
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(10)
"""
    run = ["sh", "-c", "trap '' HUP; exec \"$@\"", "sh", sys.executable, "-c", program]
    done = subprocess.run(run, capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout) == (128 + signal.SIGTERM, "goes on\n"), done.stderr
