# SPDX-License-Identifier: Apache-2.0
"""Signals to the processes of a server, also while it starts."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest


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
    wait_for_the_end_of(done.stdout)


def test_a_second_signal_ends_a_start_at_once():
    """Ctrl-C twice, by somebody whom the start takes too long."""
    code = """
import os, signal, subprocess, time
from mla_serving.server import lifecycle
lifecycle.catch_signals_while_starting()
child = subprocess.Popen(["sleep", "60"])
print(child.pid, flush=True)
try:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(30)
except lifecycle.StopRequested:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(30)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=25)
    assert done.returncode == 128 + signal.SIGTERM and not done.stderr
    wait_for_the_end_of(done.stdout)


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
        for _ in range(int(10 * seconds)):  # a signal just before one sleep ends it at the next
            time.sleep(0.1)
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
    config = SimpleNamespace(kv_transfer_config=None, speculative_config=None)
    engine = SimpleNamespace(errored=False, shutdown=lambda timeout: None, vllm_config=config)
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


@pytest.mark.parametrize("error", ["NoSuchProcess", "AccessDenied"])
def test_a_child_that_cannot_be_killed_keeps_no_other_alive(error):
    """It may end, as engines do that a first signal is ending, between the list and its turn."""
    code = f"""
import subprocess
import psutil
from mla_serving.server import lifecycle

children = [subprocess.Popen(["sleep", "60"]) for _ in range(4)]
print(*(child.pid for child in children), flush=True)
list_children, kill = psutil.Process.children, psutil.Process.kill

def list_and_end_one(self, **how):
    found = list_children(self, **how)
    children[1].kill()
    children[1].wait()
    return found

def refuse(self):
    if self.pid == children[1].pid:
        raise psutil.AccessDenied(self.pid)
    kill(self)

psutil.Process.children = list_and_end_one
if "{error}" == "AccessDenied":
    psutil.Process.kill = refuse
try:
    lifecycle.kill_everything()
finally:  # not reached
    for child in children:
        child.kill()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert done.returncode == 128 + signal.SIGTERM, done.stderr
    wait_for_the_end_of(*done.stdout.split())


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


def wait_for_the_end_of(*pids):
    for _ in range(100):
        if all(has_ended(int(pid)) for pid in pids):
            return
        time.sleep(0.05)
    pytest.fail("a child still runs")


def has_ended(pid):
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE  # where nobody reaps orphans
    except psutil.NoSuchProcess:
        return True
