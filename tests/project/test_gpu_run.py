# SPDX-License-Identifier: Apache-2.0
"""What tests/gpu/conftest.py does about its engines' processes and its tables, which needs no
GPU."""

import json
import math
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import yaml

GPU_TESTS = Path(__file__).parents[1] / "gpu"
# Of configs/serve, and for how many GPUs each is.
PROFILES = {"gpu": 1, "gpu-tp8": 8, "gpu-dp8-ep": 8, "multi-node": 16, "multi-node-dp-ep": 16}
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

# A run of pytest whose only test waits for an engine and passes, whatever became of it.
SESSION = """
import pathlib, sys, types
import pytest
sys.path.insert(0, {tests!r})
import conftest
from conftest import engines
conftest.ENGINE_RUN, conftest.SECONDS, conftest.STACK_SECONDS = pathlib.Path({engine!r}), 2, 1
conftest.each_gpu = lambda: ["0"]
some = {{name: (1, {{}}, {{}}, []) for name in ("mtp graphs", "mtp eager")}}
sys.modules["engines"] = types.SimpleNamespace(all_engines=lambda: some)

@pytest.fixture(scope="session")
def checkpoint():
    return str

def test_both(engines):
    for name in some:
        with pytest.raises(AssertionError):
            engines(name)
    sys.stderr.write("said in the test")
"""
# It says more than is told of a failure.
FAILS = r"""
import sys, time
print(*(f"line {i}." for i in range(40)), sep="\n", flush=True)
if "eager" in sys.argv[1]:
    time.sleep(300)
sys.stdout.buffer.write(b"no memory \xff\n")
sys.exit(3)
"""


# One of two engines gives a result once the other, which stays, has said who it is.
ONE_STAYS = """
import os, pathlib, sys, time
stays = pathlib.Path({stays!r})
if "eager" in sys.argv[1]:
    stays.with_suffix(".new").write_text(str(os.getpid()))
    stays.with_suffix(".new").rename(stays)
    time.sleep(300)
while not stays.exists():
    time.sleep(0.1)
print("Triton kernel JIT compilation during inference: a_kernel")
print("Backend(s) A cannot ...; falling back to rebuilding attention metadata eagerly.", flush=True)
pathlib.Path(sys.argv[2]).write_text("{{}}")
"""
ASKS_FOR_ONE = """
def test_one(engines):
    assert engines("mtp graphs") == {"compiled_late": ["a_kernel"], "drafts_rebuilt": True}
"""


# The conftest of a folder that stands for tests/gpu, on a machine that stands for one with a GPU.
TABLES = """
import importlib.metadata, importlib.util, pathlib, sys
import torch
spec = importlib.util.spec_from_file_location("gpu_conftest", {conftest!r})
sys.modules["gpu_conftest"] = gpu_conftest = importlib.util.module_from_spec(spec)
spec.loader.exec_module(gpu_conftest)
gpu_conftest.HERE = pathlib.Path(__file__).parent
torch.cuda.is_available, torch.cuda.device_count = lambda: True, lambda: 1
torch.cuda.get_device_name = lambda: "NVIDIA H200"
importlib.metadata.version = lambda name: "0.33.0"
from gpu_conftest import *
"""
ADDS = """
import dataclasses
import pytest
Distance = dataclasses.make_dataclass("Distance", ["tokens", "best", "mean", "p99", "max"])

@pytest.mark.parametrize("name", ["one", "two", "three"])
def test_row(name, parity_table):
    parity_table(name, Distance(1, 1, 0.0, 0.0, 0.0))
    {then}
"""
CUT = "Not whole: the run was cut off."
ALL = ["one", "two", "three"]
OF_ENGINE = """
import sys, types
some = {"mtp graphs": (1, {}, {}, []), "sleep": (1, {}, {}, [])}
sys.modules["engines"] = types.SimpleNamespace(all_engines=lambda: some)

def test_one(engines):
    engines("mtp graphs")
"""


@pytest.mark.parametrize(
    ("words", "then", "name", "rows", "says"),
    [
        ("tests", "", "parity", ALL, "tests/gpu -m gpu --results benchmarks/results/h200`"),
        ("tests --engines a,b", "", "parity_partial", ALL, "/h200 --engines a,b`"),
        ("tests -k three", "", "parity_partial", ["three"], "/h200 -k three`"),
        ("tests/test_row.py", "", "parity_partial", ALL, "pytest tests/test_row.py -m gpu"),
        ("tests", "assert name != 'two'", "parity", ALL, "may be missing: 1 failed."),
        ("tests -x", "assert name != 'two'", "parity_partial", ALL[:2], CUT),
        ("tests", "if name == 'two': raise KeyboardInterrupt", "parity_partial", ALL[:2], CUT),
        ("tests", "if name == 'two': import os; os._exit(1)", "parity_partial", ALL[:2], CUT),
    ],
)
def test_a_table_of_some_engines_does_not_replace_that_of_all(
    words, then, name, rows, says, tmp_path
):
    tests, results = tmp_path / "tests", tmp_path / "results"
    tests.mkdir()
    (tests / "conftest.py").write_text(TABLES.format(conftest=str(GPU_TESTS / "conftest.py")))
    (tests / "test_row.py").write_text(ADDS.format(then=then or "pass"))
    results.mkdir()
    (results / "parity.json").write_text("of all, an earlier run")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *words.split()]
    run = subprocess.run(
        [*command, "--results", str(results)], cwd=tmp_path, capture_output=True, text=True
    )
    found = json.loads((results / f"{name}.json").read_text())
    assert [row["engine"] for row in found["rows"]] == rows, run.stdout
    page = (results / f"{name}.md").read_text()
    assert says in page and (CUT in page) == (says == CUT)
    kept = {"parity.json", f"{name}.json", f"{name}.md"}
    assert {path.name for path in results.iterdir()} == kept
    if name != "parity":
        assert (results / "parity.json").read_text() == "of all, an earlier run"


def test_the_table_has_the_share_of_drafts_that_were_accepted(tmp_path):
    tests, results = tmp_path / "tests", tmp_path / "results"
    tests.mkdir()
    (tests / "conftest.py").write_text(TABLES.format(conftest=str(GPU_TESTS / "conftest.py")))
    row = "parity_table('drafts ' + name, Distance(1, 1, 0, 0, 0), [0.5], 9, accepted=0.977)"
    (tests / "test_row.py").write_text(ADDS.format(then=row))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests", "-k", "two"]
    subprocess.run([*command, "--results", str(results)], cwd=tmp_path, check=True)
    plain, drafts = json.loads((results / "parity_partial.json").read_text())["rows"]
    assert drafts["accepted"] == 0.977 and "accepted" not in plain
    page = (results / "parity_partial.md").read_text()
    assert "\ndrafts two: 97.7% of its drafts were accepted.\n" in page
    assert "| 1 of 9 | 0.5000 |" in page


@pytest.mark.parametrize("words", ["mtq", "sleep,mtq"])
def test_an_engine_that_there_is_not_is_said(words, tmp_path):
    """Else all tests are skipped, which looks like success."""
    (tmp_path / "conftest.py").write_text(TABLES.format(conftest=str(GPU_TESTS / "conftest.py")))
    (tmp_path / "test_one.py").write_text(OF_ENGINE)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--engines", words]
    run = subprocess.run([*command, "."], cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 4
    assert "no engine's name holds ['mtq']; the nearest: ['mtp graphs', " in run.stdout + run.stderr


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


def test_a_folder_of_logs_may_be_that_of_an_earlier_run(tmp_path):
    """Its result is not taken for that of an engine that gives none."""
    engine, again = tmp_path / "engine.py", tmp_path / "run"
    engine.write_text("import sys\nopen(sys.argv[2], 'x').write('{}')\n")
    names = {"tests": str(GPU_TESTS), "engine": str(engine), "folder": str(again)}
    run = [sys.executable, "-c", HANG.format(**names).replace(", 2, 1", ", 60, 1")]
    for _ in range(2):
        done = subprocess.run(run, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
    engine.write_text("")
    done = subprocess.run(run, capture_output=True, text=True, timeout=60)
    assert "FileNotFoundError" in done.stderr


def test_what_fails_is_said_at_once_with_the_end_of_its_log(tmp_path):
    """Past pytest's capture, which shows nothing of a test that passed."""
    engine, session = tmp_path / "engine.py", tmp_path / "test_session.py"
    engine.write_text(FAILS)
    session.write_text(SESSION.format(tests=str(GPU_TESTS), engine=str(engine)))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(session)]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stdout
    assert "said in the test" not in run.stderr
    graphs, eager = (
        re.search(rf"^engine '{name}': (.*) after (\d+) s; (\S+) ends with$", run.stderr, re.M)
        for name in ("mtp graphs", "mtp eager")
    )
    assert graphs[1] == "exit status 3" and eager[1] == "timeout" and 2 <= int(eager[2]) < 60
    told = run.stderr[graphs.end() :].splitlines()[1:16]
    assert told == [*(f"    line {i}." for i in range(26, 40)), "    no memory \ufffd"]
    assert "in <module>" in run.stderr[eager.end() :]  # where it stood


def test_engines_that_no_test_waits_for_end_with_the_tests(tmp_path):
    """All start with the first that a test asks for: some tests of a run need few of them."""
    engine, session = tmp_path / "engine.py", tmp_path / "test_session.py"
    stays = tmp_path / "stays"
    engine.write_text(ONE_STAYS.format(stays=str(stays)))
    names = {"tests": str(GPU_TESTS), "engine": str(engine)}
    text = SESSION.format(**names).replace(", 2, 1", ", 300, 1")
    session.write_text(text[: text.index("def test_both")] + ASKS_FOR_ONE)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(session)]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stdout
    assert "engine 'mtp" not in run.stderr
    assert not runs(int(stays.read_text()))


@pytest.mark.parametrize("profile", sorted(PROFILES))
def test_profiles_are_started_as_their_files_say(profile, monkeypatch):
    """With as many GPUs as it is for its sizes are the file's; of two or four all are used."""
    monkeypatch.setattr(sys, "path", [str(GPU_TESTS), *sys.path])
    from profile_server import CONFIGS, sizes, workers

    file = yaml.safe_load((CONFIGS / f"{profile}.yaml").read_text())
    every, nodes = sizes(profile, PROFILES[profile])
    sizes_of_both = {key for key in every.keys() & file if "port" not in key}
    assert [every[key] for key in sizes_of_both] == [file[key] for key in sizes_of_both]
    if "data-parallel-start-rank" in nodes[-1]:
        assert nodes[-1]["data-parallel-start-rank"] == file["data-parallel-size-local"]
    for gpus in (2, 4):
        options = file | sizes(profile, gpus)[0]
        kinds = ("tensor", "pipeline", "data")
        ranks = math.prod(options.get(f"{kind}-parallel-size", 1) for kind in kinds)
        assert ranks == workers(profile, gpus)


def test_every_profile_of_gpus_has_a_way_to_be_started():
    files = {path.stem for path in (GPU_TESTS.parents[1] / "configs" / "serve").glob("*.yaml")}
    assert {name for name in files if "cpu" not in name} == set(PROFILES)
