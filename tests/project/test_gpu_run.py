# SPDX-License-Identifier: Apache-2.0
"""What tests/gpu/conftest.py does about its engines' processes, which needs no GPU."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

GPU_TESTS = Path(__file__).parents[1] / "gpu"
# An engine that writes its process id and stays.
ENGINE = "import os, pathlib, sys, time\npathlib.Path({pid!r}).write_text(str(os.getpid()))\n" + (
    "time.sleep(300)\n"
)
RUN = """
import pathlib, signal, sys, threading, time
sys.path.insert(0, {tests!r})
import conftest
conftest.ENGINE_RUN = pathlib.Path({engine!r})
signal.signal(signal.SIGTERM, conftest.take_engines_along)
args = pathlib.Path({folder!r}), {{}}, {{}}
threading.Thread(target=conftest.run_engine, args=args, daemon=True).start()
time.sleep(300)
"""
HANG = """
import pathlib, sys
sys.path.insert(0, {tests!r})
import conftest
conftest.ENGINE_RUN, conftest.SECONDS, conftest.STACK_SECONDS = pathlib.Path({engine!r}), 2, 1
conftest.run_engine(pathlib.Path({folder!r}), {{}}, {{}})
"""


def runs(pid):
    """A zombie does not: where nobody adopts orphans, it stays one."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_run_that_is_told_to_end_takes_its_engines_along(tmp_path):
    pid, engine = tmp_path / "pid", tmp_path / "engine.py"
    engine.write_text(ENGINE.format(pid=str(pid)))
    names = {"tests": str(GPU_TESTS), "engine": str(engine), "folder": str(tmp_path / "run")}
    run = subprocess.Popen([sys.executable, "-c", RUN.format(**names)])
    try:
        deadline = time.monotonic() + 60
        while not (pid.exists() and pid.read_text()) and time.monotonic() < deadline:
            time.sleep(0.1)
        child = int(pid.read_text())
        run.terminate()
        assert run.wait(timeout=30) == 128 + signal.SIGTERM
        while runs(child) and time.monotonic() < deadline:  # it was killed, which takes a moment
            time.sleep(0.1)
        assert not runs(child)
    finally:
        run.kill()


def test_an_engine_that_hangs_says_where(tmp_path):
    engine = tmp_path / "engine.py"
    engine.write_text("import time\ndef stands_still():\n    time.sleep(300)\nstands_still()\n")
    names = {"tests": str(GPU_TESTS), "engine": str(engine), "folder": str(tmp_path / "run")}
    run = subprocess.run(
        [sys.executable, "-c", HANG.format(**names)], capture_output=True, text=True, timeout=60
    )
    assert "AssertionError: timeout" in run.stderr and "in stands_still" in run.stderr
