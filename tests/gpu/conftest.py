# SPDX-License-Identifier: Apache-2.0
"""All engines start at once, several at a time on each GPU; tests read what they generated."""

import contextlib
import difflib
import functools
import importlib.metadata
import itertools
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "backend"), str(HERE.parents[1] / "benchmarks")]
ENGINE_RUN = HERE / "engine_run_gpu.py"
OFFLINE = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
STACKS = {"PYTHONFAULTHANDLER": "1"}  # each process says at SIGABRT where it stands
AT_ONCE = 8
SECONDS = 300
STACK_SECONDS = 10
LOG_LINES = 15  # of an engine that failed, said at once
KIND = re.compile(r"\b[A-Z]+\d+")  # the H200 of "NVIDIA H200", the H100 of "NVIDIA H100 80GB HBM3"
# Process groups of engines; the lock is held while one starts.
RUNNING: set[int] = set()
STARTING = threading.RLock()  # a signal may come while its thread holds it
NO_MORE = threading.Event()
# Rows of the tables, by their name.
ROWS = {}


def pytest_addoption(parser):
    parser.addoption("--results", help="folder for parity.json and parity.md")
    parser.addoption("--logs", help="folder that keeps the engines' logs")
    parser.addoption("--engines", help="start only engines whose name holds one of these, by ','")


def pytest_collection_modifyitems(items):
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            item.add_marker(pytest.mark.timeout(900))
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


def kill(group, signum=signal.SIGKILL):
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signum)


def take_engines_along(signum, _):
    """A run that is told to end (`timeout` does so) would leave its engines on the GPU: each has a
    session of its own. No other starts meanwhile; this thread starts none, so it may wait."""
    STARTING.acquire()
    for group in tuple(RUNNING):
        kill(group)
    os._exit(128 + signum)


def stop_engines(futures):
    """Those that no test has waited for, when all tests are over."""
    NO_MORE.set()
    for future in futures:
        future.cancel()
    with STARTING:
        for group in tuple(RUNNING):
            kill(group)


def each_gpu():
    """What CUDA_VISIBLE_DEVICES must say for each GPU alone."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",") if visible else [str(i) for i in range(torch.cuda.device_count())]


def run_engine(folder, spec, env):
    """The result of engine_run_gpu.py as a dict; AssertionError with the log's end if it failed."""
    folder.mkdir(exist_ok=True)  # --logs may name the folder of an earlier run
    (folder / "result.json").unlink(missing_ok=True)
    (folder / "spec.json").write_text(json.dumps(spec, default=str))
    environ = {k: v for k, v in os.environ.items() if not k.startswith("MLA_BACKEND_")}
    environ |= OFFLINE | STACKS | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"} | env
    with (folder / "log").open("w") as log:
        with STARTING:
            assert not NO_MORE.is_set(), "no test waits for it"
            process = subprocess.Popen(
                [sys.executable, ENGINE_RUN, folder / "spec.json", folder / "result.json"],
                cwd="/",
                env=environ,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
            RUNNING.add(process.pid)
        try:
            status = process.wait(timeout=SECONDS)
            failed = f"exit status {status}" if status else ""
        except subprocess.TimeoutExpired:
            failed = "timeout"
            kill(process.pid, signal.SIGABRT)
            time.sleep(STACK_SECONDS)
        finally:
            kill(process.pid)
            RUNNING.discard(process.pid)
    text = (folder / "log").read_text(errors="replace")
    assert not failed, f"{failed}\n{text[-6000:]}"
    result = json.loads((folder / "result.json").read_text())
    late = re.findall(r"JIT compilation during inference: (\w+)", text)
    rebuilt = "falling back to rebuilding attention metadata" in text
    return result | {"compiled_late": sorted(set(late)), "drafts_rebuilt": rebuilt}


def run_and_tell(terminal, name, folder, spec, env):
    """run_engine, and what failed is said on `terminal` at once: pytest says it when it ends, which
    a machine that is lent for minutes may not see."""
    begin = time.monotonic()
    try:
        return run_engine(folder, spec, env)
    except Exception as error:
        if NO_MORE.is_set():
            raise
        reason, seconds = (str(error) or repr(error)).splitlines()[0], time.monotonic() - begin
        log = folder / "log"
        end = log.read_text(errors="replace").splitlines()[-LOG_LINES:] if log.exists() else []
        said = [f"\nengine {name!r}: {reason} after {seconds:.0f} s; {log} ends with", *end]
        os.write(terminal, ("\n    ".join(said) + "\n").encode())
        raise


def behind_capture(config):
    """A descriptor of stderr that pytest does not capture, for other threads too."""
    capture = config.pluginmanager.get_plugin("capturemanager")
    with capture.global_and_fixture_disabled():
        return os.dup(2)


@pytest.fixture(scope="session")
def gpus():
    return each_gpu()


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """`checkpoint(heads)`: directory of the model with so many heads."""
    from checkpoint import make_checkpoint

    @functools.cache
    def make(heads):
        return make_checkpoint(tmp_path_factory.mktemp("model") / f"h{heads}", heads)

    return make


@pytest.fixture(scope="session")
def engines(request, tmp_path_factory, checkpoint):
    """`engines(name)`: the result of an engine of engines.py. All start with the first call."""
    from engines import all_engines

    signal.signal(signal.SIGTERM, take_engines_along)
    kept = request.config.getoption("--logs", default=None)
    folder = Path(kept) if kept else tmp_path_factory.mktemp("engines")
    folder.mkdir(parents=True, exist_ok=True)
    only = (request.config.getoption("--engines", default=None) or "").split(",")
    names = list(all_engines())
    if unknown := [part for part in only if not any(part in name for name in names)]:
        near = difflib.get_close_matches(unknown[0], names, n=5, cutoff=0)
        pytest.exit(f"no engine's name holds {unknown}; the nearest: {near}", returncode=4)
    futures, gpus = {}, itertools.cycle(each_gpu())
    terminal = behind_capture(request.config)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for name, (heads, engine, env, scenarios) in all_engines().items():
            if not any(part in name for part in only):
                continue
            engine = engine | {"model": checkpoint(heads)}
            drafts = engine.get("speculative_config", {})
            if drafts.get("method") == "draft_model":
                engine["speculative_config"] = drafts | {"model": engine["model"]}
            spec = {
                "engine": engine,
                "scenarios": scenarios,
                "in_process": False,
                "choices": name.endswith("choices"),
            }
            place = folder / name.replace(" ", "-").replace(",", "")
            if "tensor_parallel_size" not in engine:
                env = env | {"CUDA_VISIBLE_DEVICES": next(gpus)}
            futures[name] = pool.submit(run_and_tell, terminal, name, place, spec, env)

        def result(name):
            if name not in futures:
                pytest.skip(f"engine {name!r} is not among --engines")
            return futures[name].result()

        yield result
        stop_engines(futures.values())


@pytest.fixture(scope="session")
def parity_table(request):
    """`parity_table(name, distance, partings, requests, choices, accepted)` adds a row to
    parity.json and parity.md in --results."""
    return make_table(request, "parity")


@pytest.fixture(scope="session")
def ranks_table(request):
    """As parity_table, to parity_ranks.json and parity_ranks.md."""
    return make_table(request, "parity_ranks")


def make_table(request, stem):
    rows = ROWS[stem] = []
    folder = request.config.getoption("--results", default=None)

    def add(name, d, partings=None, requests=None, choices=None, accepted=None):
        row = {"engine": name, **asdict(d)}
        if accepted is not None:
            row["accepted"] = accepted
        if choices is not None:
            row["choices"] = choices
        if partings is not None:
            row |= {"requests": requests, "parted": len(partings)}
            row["largest_gap"] = max(partings, default=0.0)
        rows.append(row)
        if folder:
            from ending import CUT_OFF  # of benchmarks/
            from partial import PARTIAL

            write_parity(Path(folder), f"{stem}{PARTIAL}", rows, chosen(request.config), CUT_OFF)

    return add


def pytest_sessionfinish(session, exitstatus):
    """A run of all that came to its end gives its tables their own names."""
    folder = session.config.getoption("--results", default=None)
    ended = exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
    if not folder or not ended or session.shouldfail or session.shouldstop:
        return
    from partial import PARTIAL, take_away  # of benchmarks/

    paths, words = chosen(session.config)
    failed = session.testsfailed
    note = f"Rows of tests that failed may be missing: {failed} failed." if failed else ""
    for stem, rows in ROWS.items():
        if rows and (paths or words):
            write_parity(Path(folder), f"{stem}{PARTIAL}", rows, (paths, words), note)
        elif rows:
            write_parity(Path(folder), stem, rows, ([], []), note)
            take_away(Path(folder), stem)


def chosen(config):
    """The paths and the options by which a run has some of the tests; none if it has all."""
    here = config.invocation_params.dir
    whole = any((here / arg).resolve() in (HERE, *HERE.parents) for arg in config.args)
    options = {"-k": config.option.keyword, "--engines": config.getoption("--engines")}
    words = [word for name, value in options.items() if value for word in (name, value)]
    return [] if whole else list(config.args), words


def write_parity(folder, stem, rows, some, note=""):
    """stem.json and stem.md; some: by what there are not all (`chosen`); note: what a reader must
    know of the run beside it."""
    from machine import commit  # of benchmarks/

    gpus, gpu = torch.cuda.device_count(), torch.cuda.get_device_name()
    results = f"benchmarks/results/{kind.group().lower() if (kind := KIND.search(gpu)) else '...'}"
    paths, words = some
    command = ["python", "-m", "pytest", *(paths or ["tests/gpu"]), "-m", "gpu"]
    head = {
        "command": shlex.join([*command, "--results", results, *words]),
        "gpu": f"{gpus} x " * (gpus > 1) + gpu,
        "torch": torch.__version__,
        "vllm": importlib.metadata.version("vllm"),
        "commit": commit(),
        **({"note": note} if note else {}),
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{stem}.json").write_text(json.dumps({**head, "rows": rows}, indent=1) + "\n")
    lines = [
        "# Parity in vLLM\n",
        f"`{head['command']}` on {head['gpu']}, vLLM {head['vllm']}, torch {head['torch']}, "
        f"commit {head['commit']}.\n",
        *([f"{note}\n"] if note else []),
        "Greedy tokens of a 4-layer model with DeepSeek-V3's attention (latent 512, rope 64) and "
        "their logprobs, against transformers in fp32. `own best`: tokens that are the oracle's "
        "first choice. `parted`: requests whose tokens part from those of the engine compared "
        "with (CUSTOM for vLLM's backends, CUDA graphs of the same model for our modes), and the "
        "largest gap, by the oracle, between the two tokens at such a place. `choices`: the oracle "
        "reads the tokens that the engine's indexer chose, and the gap is that of the worse of the "
        "two tokens to the oracle's first choice beside it. Other engines of v3.2 that do not read "
        "`all` choose other tokens after a rounding: their gaps are of other texts, and judge "
        "nothing.\n",
        "| engine | tokens | own best | mean abs(dlogp) | p99 | max | parted | largest gap |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        parted = f"{r['parted']} of {r['requests']}" if "parted" in r else "-"
        gap = f"{r['largest_gap']:.4f}" if r.get("parted") else "-"
        lines.append(
            f"| {r['engine']} | {r['tokens']} | {r['best']} | {r['mean']:.5f} | {r['p99']:.4f} | "
            f"{r['max']:.4f} | {parted} | {gap} |"
        )
    lines += [
        f"\n{r['engine']}: {r['accepted']:.1%} of its drafts were accepted."
        for r in rows
        if "accepted" in r
    ]
    lines += [describe_choices(r["engine"], **r["choices"]) for r in rows if "choices" in r]
    (folder / f"{stem}.md").write_text("\n".join(lines) + "\n")


def describe_choices(engine, rows, alike, mean, p99, max):
    return (
        f"\n{engine}: in {alike} of {rows} rows that leave tokens out the oracle chooses the same. "
        "The best score left out less the worst one chosen, in standard deviations of the row's "
        f"scores: mean {mean:.3f}, p99 {p99:.3f}, max {max:.3f}."
    )
