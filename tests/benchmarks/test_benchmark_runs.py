# SPDX-License-Identifier: Apache-2.0
"""How benchmarks begin and end: arguments, the folder of the results, processes."""

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import psutil
import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.parametrize(
    "name",
    [
        "accuracy",
        "decode_cpu",
        "sparse_cpu",
        "serve_cpu",
        "extends",
        "serve",
        "dense_decode",
        "sparse",
        "sparse_indexer",
    ],
)
def test_a_folder_that_cannot_be_written_is_said_at_once(name, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit, match="results cannot be written to"):
        importlib.import_module(name).main(["--results", str(tmp_path / "file" / "results")])


@pytest.mark.parametrize("words", [None, ["--results", "a b", "--cases", "b1 x", "--results=c"]])
def test_a_command_says_all_but_where_its_results_went(words, monkeypatch):
    from outputs import command

    monkeypatch.setattr(sys, "argv", ["/there/name.py", "--heads", "16", "--results", "/tmp/out"])
    expected = "--heads 16" if words is None else "--cases 'b1 x'"
    assert command("name", words) == f"python benchmarks/name.py {expected}"


@pytest.fixture
def signals():
    """Handlers are the process's: they are put back."""
    numbers = (signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored, if the tests run under nohup
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU they measure")
@pytest.mark.parametrize(
    "name", ["dense_decode", "hopper_stages", "mla_layer", "sparse", "sparse_indexer", "serve"]
)
def test_a_machine_without_a_gpu_is_told_so(name, tmp_path, monkeypatch, signals):
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--results", str(tmp_path)])
    with pytest.raises(SystemExit, match="needs an NVIDIA GPU"):
        importlib.import_module(name).main()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("said", "status", "rows"),
    [
        ("NVIDIA H100 80GB HBM3, 81559\nNVIDIA H100 NVL, 95830", 0, 2),
        ("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.", 9, 0),
        ("No devices were found", 6, 0),
    ],
)
def test_a_gpu_is_what_nvidia_smi_finds(said, status, rows, tmp_path, monkeypatch):
    """Without a driver it says so on standard output: that is no GPU's name."""
    from machine import nvidia_smi

    program = tmp_path / "nvidia-smi"
    program.write_text(f'#!/bin/sh\necho "{said}"\nexit {status}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    found = nvidia_smi("name", "memory.total")
    assert found == [line.split(", ") for line in said.splitlines()[:rows]]


def test_a_folder_is_made_and_left_empty(tmp_path):
    from outputs import claim

    claim(tmp_path / "new" / "results")
    assert list((tmp_path / "new" / "results").iterdir()) == []


def test_a_file_is_whole_or_as_it_was(tmp_path, monkeypatch):
    from outputs import write, write_json

    path = tmp_path / "a.json"
    write_json(path, {"a": 1})
    assert json.loads(path.read_text()) == {"a": 1}

    def stopped(self, text):
        self.open("w").close()
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", stopped)
    with pytest.raises(KeyboardInterrupt):
        write(path, "half")
    monkeypatch.undo()
    assert json.loads(path.read_text()) == {"a": 1}


@pytest.mark.parametrize(
    ("name", "words", "says"),
    [
        ("accuracy", "--seeds 0", "expected 1 or more, got 0"),
        ("accuracy", "--kv-block 0", "expected 1 or more, got 0"),
        ("decode_cpu", "--repetitions 0", "expected 1 or more, got 0"),
        ("sparse_cpu", "--threads 0", "expected 1 or more, got 0"),
        ("serve_cpu", "--repetitions 0", "expected 1 or more, got 0"),
        ("serve_cpu", "--dtype float32 bf16", "invalid choice: 'bf16'"),
        ("serve", "--concurrency 8 0", "expected 1 or more, got 0"),
        ("serve", "--rates 0", "expected a number above 0, got 0"),
        ("serve", "--rates inf", "expected a number above 0, got inf"),
        (
            "serve",
            "--slo ttft=2000",
            "milliseconds of ttft, tpot, e2el, as in ttft:2000, got ttft=2000",
        ),
        ("serve", "--slo itl:50", "as in ttft:2000, got itl:50"),
        ("serve", "--slo ttft:fast", "as in ttft:2000, got ttft:fast"),
        ("soak", "--blocks 0", "expected 1 or more, got 0"),
        ("soak", "--max-model-len 731", "expected --max-model-len of 732 or more"),
        ("extends", "--contexts -1", "expected 0 or more, got -1"),
        ("extends", "--sparse --contexts 1500", "prompts of up to 2048 tokens, got 2500"),
        ("dense_decode", "--cases (", "'(' is no regular expression"),
        ("sparse", "--impls (", "'(' is no regular expression"),
        ("sparse_indexer", "--cases (", "'(' is no regular expression"),
    ],
)
def test_bad_arguments_are_refused(name, words, says, tmp_path, capsys):
    with pytest.raises(SystemExit):
        importlib.import_module(name).main([*words.split(), "--results", str(tmp_path)])
    assert says in capsys.readouterr().err


GPU = {"gpu": "G", "read_gbps": 1.0, "bf16_gemm_tflops": 1.0}


@pytest.fixture
def no_gpu_needed(monkeypatch):
    for name in ("dense_decode", "sparse", "sparse_indexer"):
        module = importlib.import_module(name)
        for part in ("need_gpu", "Timer"):
            monkeypatch.setattr(module, part, MagicMock())
        monkeypatch.setattr(module, "describe_gpu", lambda: dict(GPU))


@pytest.mark.parametrize("name", ["dense_decode", "sparse", "sparse_indexer"])
def test_results_stay_where_no_case_matches(name, no_gpu_needed, tmp_path):
    (tmp_path / f"{name}.json").write_text("old")
    with pytest.raises(SystemExit, match="nothing matches --cases b9999; expected"):
        importlib.import_module(name).main(["--cases", "b9999", "--results", str(tmp_path)])
    assert [path.read_text() for path in tmp_path.iterdir()] == ["old"]


def test_results_stay_where_nothing_that_was_chosen_runs(tmp_path):
    """As of a kernel that this GPU lacks."""
    import re

    from partial import gather

    args = Namespace(results=tmp_path, cases=re.compile("b1"), impls=re.compile("hopper"))
    written = []
    with pytest.raises(SystemExit, match="nothing matches --cases b1 and --impls hopper"):
        gather("x", {}, ["b1"], lambda _: [], lambda *_: written.append(1), args, some=True)
    assert not written


@pytest.mark.parametrize(
    ("name", "words", "nearest"),
    [
        ("dense_decode", "--cases b1_h16_q1_k4096$", "b1_h128_q1_k4096"),
        ("dense_decode", "--impls hopper/pow3", "mla_kernels/hopper/pow2"),
        ("sparse", "--cases ^b1_h16_q1_8k_fp8_ds_mla", "b1_h16_q1_32k_fp8_ds_mla"),
        ("sparse", "--impls flashmla_decode", "peer/flashmla"),
        ("sparse_indexer", "--cases b64x32768_q8", "b64x32768_q4"),
    ],
)
def test_a_pattern_that_is_in_no_name_is_told_the_nearest(name, words, nearest, tmp_path):
    """At once, also where there is no GPU: before anything is measured."""
    with pytest.raises(SystemExit) as left:
        importlib.import_module(name).main([*words.split(), "--results", str(tmp_path)])
    assert str(left.value).startswith(f"nothing matches {words}; expected a regular expression")
    assert nearest in str(left.value).partition("the nearest: ")[2].split(", ")


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def three_cases(no_gpu_needed, monkeypatch):
    """`three_cases(name)`: the benchmark with cases a1, a2 and b, and a stand-in for measuring one,
    whose side effect a test may set."""

    def prepare(name):
        module = importlib.import_module(name)
        shapes = [SimpleNamespace(name=case, floor_us=lambda roofs: 1.0) for case in CASES]
        row = {"op": "decode", "impl": "i", "us": 1.0, "floor_us": 1.0}
        measure = MagicMock(
            side_effect=lambda *args: [
                {**row, "case": next(a.name for a in args if isinstance(a, SimpleNamespace))}
            ]
        )
        monkeypatch.setattr(module, "SHAPES", shapes)
        monkeypatch.setattr(module, "bench", measure)
        return module, measure

    monkeypatch.setattr(importlib.import_module("dense_report"), "plot", lambda *_: None)
    monkeypatch.setattr(importlib.import_module("sparse_report"), "taken", lambda case: "")
    return prepare


CASES = ("a1", "a2", "b")


def files_of(name, ending=""):
    """Of a run in an empty folder: the page of the indexer is that of sparse.py, unless partial."""
    page = "sparse" if (name, ending) == ("sparse_indexer", "") else name
    return sorted([f"{name}{ending}.json", f"{page}{ending}.md"])


BENCHES = ["dense_decode", "sparse", "sparse_indexer"]


def cases_in(path):
    return [row["case"] for row in json.loads(path.read_text())["rows"]]


@pytest.mark.parametrize("name", BENCHES)
def test_some_cases_do_not_replace_the_results_of_all(name, three_cases, tmp_path):
    module, _ = three_cases(name)
    assert module.main(["--results", str(tmp_path)]) == 0
    assert names_in(tmp_path) == files_of(name)
    assert cases_in(tmp_path / f"{name}.json") == list(CASES)
    assert module.main(["--cases", "^a", "--results", str(tmp_path)]) == 0
    assert names_in(tmp_path) == sorted(files_of(name) + files_of(name, "_partial"))
    assert cases_in(tmp_path / f"{name}.json") == list(CASES)
    assert cases_in(tmp_path / f"{name}_partial.json") == ["a1", "a2"]
    assert "Not whole" not in (tmp_path / f"{name}_partial.json").read_text()
    assert module.main(["--results", str(tmp_path)]) == 0
    assert names_in(tmp_path) == files_of(name)


@pytest.mark.parametrize("name", ["dense_decode", "sparse"])
def test_some_implementations_do_not_replace_the_results_of_all(name, three_cases, tmp_path):
    module, _ = three_cases(name)
    assert module.main(["--impls", "hopper", "--results", str(tmp_path)]) == 0
    assert names_in(tmp_path) == files_of(name, "_partial")


@pytest.mark.parametrize("name", BENCHES)
def test_a_run_that_is_cut_off_leaves_its_rows_and_says_so(name, three_cases, tmp_path):
    module, measure = three_cases(name)
    assert module.main(["--results", str(tmp_path)]) == 0
    whole, rows = [path.read_bytes() for path in sorted(tmp_path.iterdir())], measure.side_effect

    def cut(*args):
        if measure.call_count == len(CASES) + 3:
            raise KeyboardInterrupt
        return rows(*args)

    measure.side_effect = cut
    with pytest.raises(KeyboardInterrupt):
        module.main(["--results", str(tmp_path)])
    assert cases_in(tmp_path / f"{name}_partial.json") == ["a1", "a2"]
    for file in files_of(name, "_partial"):
        text = (tmp_path / file).read_text()
        assert "Not whole: 2 of 3 cases, then the run was cut off." in text
    assert [(tmp_path / file).read_bytes() for file in files_of(name)] == whole


def test_a_layer_of_other_lengths_does_not_replace_all(no_gpu_needed, monkeypatch, tmp_path):
    import mla_layer

    for part in ("need_gpu", "make_naive", "make_case"):
        monkeypatch.setattr(mla_layer, part, MagicMock())
    monkeypatch.setattr(mla_layer, "describe_gpu", lambda: {"gpu": "G", "commit": "c"})
    row = {"case": "c", "impl": "i", "floor_us": 1.0, "roof": "memory", "us": 2.0, "note": ""}
    monkeypatch.setattr(mla_layer, "run_case", lambda *_: [dict(row)])
    files = ["mla_layer.json", "mla_layer.md"]
    for words in ("--prefill 512", "--batch 8", "--impl triton"):
        folder = tmp_path / words
        argv = ["mla_layer.py", *words.split(), "--results", str(folder)]
        monkeypatch.setattr(sys, "argv", argv)
        assert mla_layer.main() == 0
        assert names_in(folder) == ["mla_layer_partial.json", "mla_layer_partial.md"]
    monkeypatch.setattr(sys, "argv", ["mla_layer.py", "--results", str(folder)])
    assert mla_layer.main() == 0
    assert names_in(folder) == files
    calls = iter([[dict(row)], [dict(row)]])
    monkeypatch.setattr(mla_layer, "run_case", lambda *_: next(calls))
    with pytest.raises(StopIteration):
        mla_layer.main()
    said = "Not whole: 2 of 4 cases, then the run was cut off."
    assert said in (folder / "mla_layer_partial.md").read_text()
    assert len(json.loads((folder / "mla_layer.json").read_text())["rows"]) == 4


def test_a_dense_result_names_all_of_its_command(no_gpu_needed, monkeypatch, tmp_path):
    import dense_decode

    written = []
    monkeypatch.setattr(dense_decode, "bench", lambda *_: [{"case": "c", "impl": "i", "us": 1.0}])
    monkeypatch.setattr(dense_decode, "sustained_roofs", lambda seconds: {})
    monkeypatch.setattr(dense_decode, "write_report", lambda report, *_: written.append(report))
    words = ["--sustained", "--seconds", "9", "--cases", "^b1_"]
    assert dense_decode.main([*words, "--results", str(tmp_path)]) == 0
    said = "python benchmarks/dense_decode.py --sustained --seconds 9 --cases '^b1_'"
    assert {report["command"] for report in written} == {said}


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
    import servers

    monkeypatch.setattr(servers.sys, "executable", fake_python(tmp_path, WELL))
    with servers.Server("ours", tmp_path, [], tmp_path / "log") as server:
        seconds = server.wait_ready()
        assert 0.5 < seconds < time.monotonic() - server.started


# In the place of Python: a server that listens, the port is its last word, and never answers.
MUTE = f"""exec {sys.executable} -c '
import socket, sys, time
listening = socket.create_server(("127.0.0.1", int(sys.argv[-1])))
time.sleep(300)' "$@"
"""


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


# In the place of Python: servers whose engine fails. What vLLM logs last names no cause.
LAST = "RuntimeError: Engine core initialization failed. See root cause above."
FAILS = f"""echo 'ValueError: Free memory on device cuda:0'\n%s\necho '{LAST}'\nexit 1"""
PYDANTIC = """echo 'ValidationError: 1 validation error for ModelConfig'
echo '  Value error, length 9 is too large [type=value_error, input_value=ArgsKwargs((), {})]'
echo '    For further information visit https://errors.pydantic.dev'
"""
NOTES = "printf 'OutOfMemoryError: 2 GiB' > $_MLA_REFUSAL_FILE"


@pytest.mark.parametrize(
    ("between", "cause"),
    [
        ("", "ValueError: Free memory on device cuda:0"),
        ("echo 'mla-backend serve: mla-backend cannot serve it'", "mla-backend cannot serve it"),
        (NOTES, "OutOfMemoryError: 2 GiB"),
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
