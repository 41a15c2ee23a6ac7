# SPDX-License-Identifier: Apache-2.0
"""The gate of benchmarks/serve.py: what answers otherwise than the first gets no speed."""

import contextlib
import http.server
import json
import math
import os
import threading
import time
from collections import Counter
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch

SOUND = [[{"a": -0.1, "b": -2.5}, {"c": -1.0, "d": -1.05}, {"e": -0.3}], [{"f": -0.2}]]


def changed(at, said):
    other = [list(answer) for answer in SOUND]
    other[0][at] = said
    return other


@pytest.mark.parametrize(
    ("other", "nats"),
    [
        (SOUND, 0),
        (changed(0, {"a": -0.15, "b": -2.0}), 0.05),
        (changed(0, {"b": -0.9, "a": -1.0}), 1.6),
        (changed(0, {"b": -0.9}), math.inf),  # it does not know the other's best
        (changed(0, {"a": math.nan}), math.inf),
        # A near tie may fall either way, and what follows is another text.
        (changed(1, {"d": -1.02, "c": -1.03}), 0.03),
        ([[*changed(1, {"d": -1.02, "c": -1.03})[0][:2], {"z": -0.3}], SOUND[1]], 0.03),
        (changed(2, {"z": -0.3}), math.inf),
        ([SOUND[0], [{"f": -0.3}]], 0.1),
    ],
)
def test_nats_between_two_servers(other, nats):
    from serve_gate import drift

    assert drift(SOUND, other) == drift(other, SOUND) == pytest.approx(nats)


@pytest.fixture
def server():
    """(url, [bodies asked]) of one that answers two prompts out of order; 500 once told so."""
    asked = []

    class Handler(http.server.BaseHTTPRequestHandler):
        fails = False

        def do_POST(self):
            asked.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            if asked[-1]["model"] == "crashes":
                return
            if asked[-1]["model"] == "hangs":
                time.sleep(2)
            found = [
                {"tokens": ["f"], "token_logprobs": [-0.2], "top_logprobs": [{"g": -2, "f": -0.2}]}
            ]
            found += [{"tokens": ["a"], "token_logprobs": [-0.1], "top_logprobs": [{"a": -0.1}]}]
            choices = [{"index": 1 - i, "logprobs": one} for i, one in enumerate(found)]
            self.send_response(500 if asked[-1]["model"] == "ill" else 200)
            self.end_headers()
            self.wfile.write(json.dumps({"choices": choices}).encode())

        def log_message(self, *_):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{running.server_port}", asked
        running.shutdown()
        thread.join()


def test_what_is_asked_and_read(server):
    from serve_gate import PROMPTS, ask

    url, asked = server
    answers = ask(url, "m")
    assert answers == [[{"a": -0.1}], [{"f": -0.2, "g": -2}]]
    assert next(iter(answers[1][0])) == "f"  # its own token, whatever the order of the others
    assert [len(prompt) for prompt in asked[0]["prompt"]] == list(PROMPTS)
    assert asked[0]["temperature"] == 0
    with pytest.raises(ValueError, match="HTTP 500"):
        ask(url, "ill")


def test_a_server_that_crashes_or_hangs_gives_no_answer(server, monkeypatch):
    """The others are measured all the same."""
    import serve_gate

    url, _ = server
    with pytest.raises(ValueError, match="RemoteDisconnected"):
        serve_gate.ask(url, "crashes")
    monkeypatch.setattr(serve_gate, "ANSWER_SECONDS", 0.2)
    with pytest.raises(ValueError, match="TimeoutError"):
        serve_gate.ask(url, "hangs")
    with pytest.raises(ValueError, match="URLError"):
        serve_gate.ask("http://127.0.0.1:9", "m")


def test_a_tolerance_for_fp8():
    from serve_gate import FP8_TOLERANCE, TOLERANCE, tolerance

    assert tolerance("auto", ["CUSTOM", "FLASHMLA"]) == TOLERANCE
    for found in (("fp8", ["CUSTOM"]), ("fp8_ds_mla", ["CUSTOM"]), ("auto", ["CUSTOM+fp8_query"])):
        assert tolerance(*found) == FP8_TOLERANCE


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        (changed(0, {"b": -0.9, "a": -1.0}), "differs from the first server by 1.6 nats"),
        (changed(0, {"b": -0.9}), "differs from the first server by inf nats"),
        (ValueError("HTTP 500"), "gave no answer: HTTP 500"),
    ],
)
def test_a_server_that_differs_is_not_loaded(monkeypatch, answers, said):
    import serve_gate
    import serve_load

    told = [SOUND, SOUND, answers]
    monkeypatch.setattr(serve_gate, "ask", MagicMock(side_effect=told))
    rows = []
    args = MagicMock(kv_cache_dtype="auto", backends=["CUSTOM", "FLASHMLA"])
    runner = serve_load.Runner(args, [], Path(), math.inf, rows.append)
    servers = [MagicMock(backend=name) for name in ("CUSTOM", "FLASHMLA", "TRITON_MLA")]
    assert [runner.ready(server, 40.0) for server in servers] == [True, True, False]
    assert [row.get("nats_from_first") for row in rows[:2]] == [0, 0]
    assert rows[2]["red"] and rows[3]["backend"] == "TRITON_MLA"
    assert rows[3]["error"] == said
    json.dumps(rows, allow_nan=False)


def test_a_server_is_ready_when_it_says_so(monkeypatch):
    """Not when the prompts have been made and the servers before it have been asked. One that
    fails is said while others still start."""
    import serve_gate
    import serve_load
    from serve import parse_arguments
    from servers import StartError

    waited_for = {name: threading.Event() for name in ("CUSTOM", "FLASHMLA", "TRITON_MLA")}

    class Server(contextlib.nullcontext):
        url = log = None
        pids = frozenset()

        def __init__(self, backend, *_):
            super().__init__(self)
            self.backend = backend

        def terminate(self):
            pass

        def wait_ready(self):
            waited_for[self.backend].set()
            if self.backend == "TRITON_MLA":
                raise StartError("TRITON_MLA did not start: why")
            assert said_so.wait(10)
            return 40.0 + len(self.backend)

        def compiled_late(self):
            return Counter()

    made, rows, said_so = [], [], threading.Event()

    def prepare(runner):
        made.append(all(one.wait(10) for one in waited_for.values()))

    def save(row):
        rows.append(row)
        said_so.set()

    monkeypatch.setattr(serve_load.Runner, "prepare", prepare)
    monkeypatch.setattr(serve_load, "Server", Server)
    monkeypatch.setattr(serve_load, "nvidia_smi", lambda *_, of="gpu": [["G"]])
    monkeypatch.setattr(serve_load, "run_load", lambda *_, **how: {"failed": 1, "reason": ""})
    monkeypatch.setattr(serve_gate, "ask", lambda *_: SOUND)
    monkeypatch.setattr(serve_gate, "complete", lambda *_, **how: [])
    words = ["--together", "--reduced", "--repetitions", "1", "--backends", *waited_for]
    serve_load.run(parse_arguments(words), save)
    assert made == [True]
    said = {row["backend"]: row["start_s"] for row in rows if "start_s" in row}
    assert said == {"CUSTOM": 46.0, "FLASHMLA": 48.0}
    assert rows[0] == {"backend": "TRITON_MLA", "error": "TRITON_MLA did not start: why"}


def gate(backend, nats, **more):
    return {"backend": backend, "start_s": 40.0, "nats_from_first": nats, **more}


SPEED = {"backend": "CUSTOM", "shape": "8/8", "loop": "closed", "concurrency": 4}


def test_no_speed_that_no_other_server_stands_behind():
    from serve_gate import withhold

    speed = SPEED | {"output_tok_s": 9.0, "ttft_p50": 1.0}
    first, red, green = gate("CUSTOM", 0), gate("FLASHMLA", 1.5, red=True), gate("TRITON_MLA", 0.01)
    assert withhold([first, speed, red]) == [
        first,
        SPEED | {"error": "no other backend gives the same answers"},
        red,
    ]
    for sound in ([first, speed], [first, speed, green], [first, red, speed, green], [speed]):
        assert withhold(sound) == sound


# Labels of one vLLM backend do not vouch for each other where another backend was asked.
OURS = ("CUSTOM", "CUSTOM+fp8_query")
VOUCHED = [
    (OURS, (), True),
    (OURS, ("FLASHMLA",), False),
    ((*OURS, "TRITON_MLA"), ("FLASHMLA",), True),
    (("CUSTOM", "FLASHMLA"), ("CUSTOM+fp8_query",), True),
    (("CUSTOM",), ("CUSTOM+fp8_query",), False),
]


@pytest.mark.parametrize(("agreed", "red", "vouched"), VOUCHED)
def test_no_speed_that_only_the_same_backend_stands_behind(agreed, red, vouched):
    from serve_gate import withhold

    rows = [gate(name, 0.01) for name in agreed] + [gate(name, 1.5, red=True) for name in red]
    rows += [SPEED | {"backend": name, "output_tok_s": 9.0} for name in agreed]
    kept = withhold(rows)
    assert [row["backend"] for row in kept if "output_tok_s" in row] == list(agreed) * vouched
    errors = [row["backend"] for row in kept if "error" in row]
    assert errors == list(agreed) * (not vouched)


class FakeEngine:
    def __init__(self, backend, said):
        self.backend, self.said = backend, said

    def tell(self, do):
        assert do == "say"

    def answer(self):
        return self.said


@pytest.mark.parametrize(
    ("others", "timed"),
    [
        ([], ["A"]),
        ([{"answers": SOUND}], ["A", "B"]),
        ([{"answers": changed(2, {"e": -0.5})}], []),
        ([{"answers": changed(2, {"e": math.nan})}, {"answers": SOUND}], ["A", "C"]),
        ([{"answers": SOUND}, {"error": "the engine has died"}], ["A", "B"]),
        ([{"error": "the engine has died"}], []),
    ],
)
def test_engines_that_differ_are_not_timed(others, timed):
    from step_driver import agreeing

    said = [{"answers": SOUND}, *others]
    engines = [FakeEngine(name, answer) for name, answer in zip("ABC", said, strict=False)]
    rows = []
    green = agreeing(engines, {"heads": 16}, 0.1, rows.append)
    assert [engine.backend for engine in green] == timed
    gates = {row["backend"]: row for row in rows if "nats_from_first" in row}
    errors = {row["backend"]: row["error"] for row in rows if "error" in row}
    assert list(gates) == [engine.backend for engine in engines]
    assert set(errors) == gates.keys() - set(timed)
    assert all(row["heads"] == 16 and row.get("red", False) == (name in errors and name != "A")
               for name, row in gates.items())  # fmt: skip
    if not timed:
        assert errors["A"] == "no other backend gives the same answers"
    json.dumps(rows, allow_nan=False)


@pytest.mark.parametrize(("agreed", "red", "timed"), VOUCHED)
def test_engines_of_one_backend_do_not_vouch_for_each_other(agreed, red, timed):
    from step_driver import agreeing

    engines = [FakeEngine(name, {"answers": SOUND}) for name in agreed]
    engines += [FakeEngine(name, {"answers": changed(2, {"e": -0.5})}) for name in red]
    rows = []
    assert agreeing(engines, {}, 0.1, rows.append) == engines[: len(agreed)] * timed
    errors = {row["backend"] for row in rows if "error" in row}
    assert errors == {*red, *([] if timed else agreed)}


def test_a_first_engine_that_answers_nothing():
    """The next one is then the first; what is no number agrees with nothing, itself neither."""
    from step_driver import agreeing

    died, sound = {"error": "the engine has died"}, {"answers": SOUND}
    engines = [FakeEngine(*one) for one in zip("ABC", (died, sound, sound), strict=True)]
    green = agreeing(engines, {}, 0.1, lambda row: None)
    assert [engine.backend for engine in green] == ["B", "C"]
    nan = {"answers": changed(0, {"a": math.nan})}
    assert agreeing([FakeEngine("A", nan)], {}, 0.1, lambda row: None) == []
    assert agreeing([FakeEngine("A", nan), engines[1]], {}, 0.1, lambda row: None) == []
    rows, heard = [], [FakeEngine("A", nan), *engines[1:]]
    assert agreeing(heard, {}, 0.1, rows.append) == heard[1:], "A is no yardstick for the others"
    rows.clear()
    assert agreeing(engines[1:2], {}, 0.1, rows.append) == engines[1:2]
    assert rows == [{"backend": "B", "nats_from_first": None}], "compared with nobody"


def test_a_page_says_how_far_apart_they_were():
    from serve_pages import _gate_lines

    lines = _gate_lines([gate("CUSTOM", 0.0), gate("FLASHMLA", 0.0312), gate("X", None, red=True)])
    assert lines[0] == "| backend | nats from the first, at most | ready after s |"
    assert lines[2:] == [
        "| mla-backend | 0.000 | 40 |", "| FLASHMLA | 0.031 | 40 |", "| X | none to compare | 40 |",
    ]  # fmt: skip
    older = [{"backend": "CUSTOM", "start_s": 1.0, "same_tokens_as_first": 0.5}]
    assert _gate_lines(older)[2] == "| mla-backend | 50.0% | 1 |"


def test_a_page_of_steps_says_how_far_apart_they_were():
    from serve_report import Report
    from step_pages import _gate

    rows = [gate("CUSTOM", 0.0), gate("FLASHMLA", 0.0312), gate("X", None), gate("FLASHMLA", 0.02)]
    (line, _) = _gate(Report("steps", "", {}, {}, rows))
    assert line.endswith(": mla-backend 0.000, FLASHMLA 0.031, X none to compare.")
    assert _gate(Report("steps", "", {}, {}, [SPEED])) == []


# The oldest block of the cache is read twice, and the newest not at all.
TWICE = """
import functools, torch
from mla_kernels.decode import torch_sdpa as module
attend = lambda f, q, keys, *r: f(q, torch.cat([keys[:, :64], keys[:, :-64]], 1), *r)
module.attend_in_call = functools.partial(attend, module.attend_in_call)
"""


def break_one(module, folder, monkeypatch):
    """Every engine of `module` is ours, and the attention of the one called "broken" is wrong."""
    (folder / "sitecustomize.py").write_text(TWICE)
    path = [str(folder), os.environ.get("PYTHONPATH", "")]
    envs = {"broken": {"PYTHONPATH": os.pathsep.join(filter(None, path))}}
    monkeypatch.setattr(module, "engine_of", lambda name: ("CUSTOM", envs.get(name, {})))


@pytest.mark.engine
@pytest.mark.skipif(torch.cuda.is_available(), reason="it breaks the attention of a CPU")
def test_servers_on_a_cpu(demo_checkpoint, tmp_path, monkeypatch):
    """Sound ones agree; one with broken attention does not."""
    import serve_gate
    import serve_load
    import servers

    break_one(servers, tmp_path, monkeypatch)
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    options = ["--served-model-name", serve_load.NAME, "--load-format", serve_load.TELLING]
    options += ["--max-model-len", "1024", "--enforce-eager", "--block-size", "64"]
    answers = []
    with contextlib.ExitStack() as stack:
        made = [
            stack.enter_context(
                servers.Server(name, demo_checkpoint("v2-lite"), options, tmp_path / name)
            )
            for name in ("first", "second", "broken")
        ]
        for server in made:
            server.wait_ready()
            answers.append(serve_gate.ask(server.url, serve_load.NAME))
    first, second, broken = answers
    assert serve_gate.drift(first, second) <= serve_gate.TOLERANCE
    assert serve_gate.drift(first, broken) > serve_gate.TOLERANCE


@pytest.mark.engine
@pytest.mark.skipif(torch.cuda.is_available(), reason="it breaks the attention of a CPU")
def test_engines_of_steps_on_a_cpu(demo_checkpoint, tmp_path, monkeypatch):
    """Sound ones are timed; one with broken attention is not."""
    import serve_steps
    from serve import parse_arguments
    from serve_report import Report

    break_one(serve_steps, tmp_path, monkeypatch)
    words = "--mode steps --as-is --eager --steps 6 --case-seconds 1 --cache-gib 0.05 "
    words += "--batches 2 --contexts 100 --backends first second broken"
    args = parse_arguments([*words.split(), "--model", str(demo_checkpoint("v2-lite"))])
    report = Report("steps", "python x", {}, {})
    serve_steps.run(args, report.add)
    rows = report.rows
    first, second, broken = (row for row in rows if "nats_from_first" in row)
    assert first["nats_from_first"] == 0 and second["nats_from_first"] <= 0.1
    assert broken["red"]
    assert [row["backend"] for row in rows if "step_ms" in row] == ["first", "second"]
    (error,) = (row for row in rows if "error" in row)
    assert error["backend"] == "broken" and "differs from the first engine" in error["error"]
