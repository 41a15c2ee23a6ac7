# SPDX-License-Identifier: Apache-2.0
"""Servers under load: whose turn it is, at what rate, and what of it counts."""

import itertools
import math
from collections import Counter
from pathlib import Path
from unittest.mock import MagicMock

import pytest

from tests.benchmarks.measured_rows import serve_page, serve_row


@pytest.mark.parametrize("failed", [0, 3])
def test_a_load_with_failed_requests_is_not_measured(failed, monkeypatch):
    import serve_load
    from serve_cases import Load, Shape

    measured = serve_row("CUSTOM", 100.0, request_s=9.0)
    measured |= {"failed": failed, "reason": "7 of 8 tokens"}
    monkeypatch.setattr(serve_load, "run_load", lambda *_, **load: measured)
    args = MagicMock(rounds=5, repetitions=1)
    rows = []
    runner = serve_load.Runner(args, [Load(Shape(8, 8), 4)], Path(), math.inf, rows.append)
    runner.run([MagicMock(backend="CUSTOM")])
    (row,) = rows
    assert ("output_tok_s" in row) == (not failed) == bool(runner.fullest)
    if failed:
        page = serve_page(row, serve_row("FLASHMLA", 50.0))
        assert "loop closed concurrency 4): 3 of 20 requests failed: 7 of 8 tokens" in page
        assert "geometric mean" not in page


def test_each_server_begins_as_often_and_an_open_loop_keeps_its_rate(monkeypatch):
    import serve_load
    from serve_cases import Load, Shape

    loads = [Load(Shape(8, 8), 4), Load(Shape(8, 8), share=0.5)]
    speeds = iter(range(1, 100))  # each loop is faster than the one before
    monkeypatch.setattr(
        serve_load, "run_load", lambda *_, **how: {"failed": 0, "request_s": float(next(speeds))}
    )
    rows = []
    args = MagicMock(rounds=1, repetitions=2)
    runner = serve_load.Runner(args, loads, Path(), math.inf, rows.append)
    runner.run([MagicMock(backend="CUSTOM"), MagicMock(backend="FLASHMLA")])
    said = [(row["backend"], row.get("concurrency"), row.get("rate")) for row in rows]
    assert said[:4] == [
        ("CUSTOM", 4, None), ("FLASHMLA", 4, None),
        ("FLASHMLA", None, 0.5), ("CUSTOM", None, 0.5),
    ]  # fmt: skip
    assert said[4:] == [
        ("FLASHMLA", 4, None), ("CUSTOM", 4, None),
        ("CUSTOM", None, 0.5), ("FLASHMLA", None, 0.5),
    ]  # fmt: skip


def test_open_loops_have_the_rate_of_the_fullest_closed_one(monkeypatch):
    """Not that of the last one, of another shape or of another server."""
    import serve_load
    from serve_cases import Load, Shape

    small, large = Shape(8, 8), Shape(16, 8)
    loads = [Load(small, 4), Load(small, 8), Load(small, share=0.5), Load(large, share=0.5)]
    speeds = {("CUSTOM", 4): 6.0, ("CUSTOM", 8): 4.0}

    def load(url, model, **how):
        asked.append(how["rate"])
        return {"failed": 0, "request_s": speeds.get((url, how["concurrency"]), 100.0)}

    rows, asked = [], []
    monkeypatch.setattr(serve_load, "run_load", load)
    args = MagicMock(rounds=1, repetitions=1)
    runner = serve_load.Runner(args, loads, Path(), math.inf, rows.append)
    for name in ("CUSTOM", "FLASHMLA"):  # one behind the other, as without --together
        runner.run([MagicMock(backend=name, url=name)])
    assert asked == [None, None, 3.0] * 2
    unknown = "no closed loop of that shape was run on the first server"
    assert [row.get("not_run") for row in rows] == [None, None, None, unknown] * 2


@pytest.mark.parametrize("clients", ["128", "1 8 32 96 128"])
def test_open_loops_wait_for_the_closed_ones_of_most_clients(clients, monkeypatch):
    """Which are the fullest, as here."""
    import serve_load
    from serve import parse_arguments
    from serve_cases import loads

    def load(url, model, **how):
        return {"failed": 0, "request_s": float(how["concurrency"] or how["rate"])}

    monkeypatch.setattr(serve_load, "run_load", load)
    words = ["--shapes", "8/8", "--repetitions", "2", "--concurrency", *clients.split()]
    args = parse_arguments(words)
    asked = loads(args.shapes, args.concurrency, args.rates, reduced=False)
    rows = []
    runner = serve_load.Runner(args, asked, Path(), math.inf, rows.append)
    runner.run([MagicMock(backend="CUSTOM")])
    assert [row["rate"] for row in rows if row["loop"] == "open"] == [64.0, 102.4] * 2
    assert not any("not_run" in row for row in rows)


def test_only_the_first_server_sets_rates(monkeypatch):
    import serve_load
    from serve_cases import Load, Shape

    loads = [Load(Shape(8, 8), 4), Load(Shape(8, 8), share=0.5)]
    monkeypatch.setattr(
        serve_load,
        "run_load",
        lambda url, *_, **how: {"failed": url == "CUSTOM", "reason": "", "request_s": 9.0},
    )
    rows = []
    args = MagicMock(rounds=1, repetitions=1)
    runner = serve_load.Runner(args, loads, Path(), math.inf, rows.append)
    for name in ("CUSTOM", "FLASHMLA"):
        runner.run([MagicMock(backend=name, url=name)])
    assert ["not_run" in row for row in rows] == [False, True] * 2


def test_no_prompt_is_sent_twice_to_a_server(monkeypatch):
    """Or with --enable-prefix-caching loads would be of what is cached."""
    import serve_load
    from serve_cases import Load, Shape

    sent, made = [], []

    def load(*_, seed, seconds, **how):
        assert seconds == 600 + 1000
        sent.append(seed)
        return {"failed": 0, "request_s": 1.0}

    monkeypatch.setattr(serve_load.time, "monotonic", lambda: 0.0)
    monkeypatch.setattr(serve_load, "run_load", load)
    monkeypatch.setattr(serve_load, "make_prompts", lambda *_, seed, **how: made.append(seed))
    monkeypatch.setattr(serve_load.serve_gate, "complete", lambda *_, **how: None)
    shape, other = Shape(8, 8), Shape(16, 8)
    loads = [Load(shape, 4), Load(shape, 8), Load(shape, share=0.5), Load(other, 4)]
    runner = serve_load.Runner(
        MagicMock(rounds=1, repetitions=2), loads, Path(), 1000.0, MagicMock()
    )
    runner.prepare()
    servers = [MagicMock(backend="CUSTOM"), MagicMock(backend="FLASHMLA")]
    runner.warm_up(servers[0])
    warm_ups = sent.copy()
    sent.clear()
    runner.run(servers)
    assert made == sent[::2] == sent[1::2]  # both get the same
    assert len({*warm_ups, *made}) == len(warm_ups) + len(made) == 2 + 8


def test_as_many_prompts_warm_up_as_fill_several_steps(monkeypatch):
    import serve_load
    from serve_cases import Load, Shape

    sent = []
    monkeypatch.setattr(serve_load, "run_load", lambda *_, **how: sent.append(how))
    monkeypatch.setattr(serve_load.serve_gate, "complete", lambda *_, **how: None)
    loads = [Load(Shape(1024, 1024), 8), Load(Shape(8192, 1024), 8), Load(Shape(32768, 256), 2)]
    loads += [Load(Shape(1024, 1024), 128)]
    args = MagicMock(rounds=1)
    runner = serve_load.Runner(args, loads, Path(), math.inf, None)
    runner.warm_up(MagicMock())
    assert [(how["input_len"], how["requests"], how["output_len"]) for how in sent] == [
        (1024, 32, 2), (8192, 4, 2), (32768, 2, 2),
    ]  # fmt: skip


@pytest.mark.parametrize("longest", [8, 100, 32768])
def test_prompts_of_many_lengths_warm_up_alone(longest, monkeypatch):
    """None is longer than a step or than those of the loads, whose servers take no longer ones."""
    import serve_load
    from serve_cases import Load, Shape

    asked = []

    def complete(url, **body):
        asked.append((len(body["prompt"]), body["max_tokens"]))

    monkeypatch.setattr(serve_load, "run_load", lambda *_, **how: None)
    monkeypatch.setattr(serve_load.serve_gate, "complete", complete)
    loads = [Load(Shape(4, 8), 1), Load(Shape(longest, 8), 1)]
    serve_load.Runner(MagicMock(rounds=1), loads, Path(), math.inf, None).warm_up(MagicMock())
    lengths = [15, 16, 23, 24, 31, 32, 47, 48, 63, 64, 95, 96, 127, 128, 255, 256, 511, 512]
    lengths += [1023, 1024, 1535, 1536, 2047, 2048, 3071, 3072, 4095, 4096, 8191, 8192]
    assert asked == [(length, 2) for length in lengths if length <= longest]


@pytest.mark.parametrize(("left", "tried"), [(math.inf, 2), (0.0, 0)])
def test_a_server_that_does_not_answer_is_not_warmed_up_for_hours(left, tried, monkeypatch):
    import serve_load
    from serve_cases import Load, Shape

    asked = []

    def complete(url, **body):
        asked.append(body)
        if len(asked) == 2:
            raise ValueError("TimeoutError")

    monkeypatch.setattr(serve_load, "run_load", lambda *_, **how: None)
    monkeypatch.setattr(serve_load.serve_gate, "complete", complete)
    args = MagicMock(rounds=1)
    serve_load.Runner(args, [Load(Shape(64, 8), 1)], Path(), left, None).warm_up(MagicMock())
    assert len(asked) == tried


@pytest.mark.parametrize(
    ("before", "after", "measured", "late"),
    [
        (Counter(a=2, b=1), Counter(a=2, b=3, c=1), {"a"}, {"b": 2, "c": 1}),
        (Counter(), Counter(), {"a"}, {}),
        (Counter(), Counter(), set(), None),  # no load, no time: nothing was seen
        (None, None, {"a"}, None),  # nobody watched
    ],
)
def test_kernels_of_loads_are_told_from_those_before(
    before, after, measured, late, monkeypatch, tmp_path
):
    import serve_load
    from serve_report import Report

    counts = iter([before, after])
    server = MagicMock(backend="a", pids=set(), compiled_late=lambda: next(counts))
    server.__enter__.return_value = server
    monkeypatch.setattr(serve_load, "Server", lambda *_: server)
    runner = MagicMock(measured=measured)
    monkeypatch.setattr(serve_load, "Runner", MagicMock(return_value=runner))
    monkeypatch.setattr(serve_load, "as_completed", lambda _: [])
    monkeypatch.setattr(serve_load, "nvidia_smi", lambda *_, **__: ["a GPU"])
    monkeypatch.setattr(serve_load, "server_options", lambda *_: [])
    monkeypatch.setattr(serve_load, "gpu_memory_gib", lambda _: None)
    rows = []
    args = MagicMock(backends=["a"], together=False, time_limit=90.0, shapes=[], reduced=False)
    serve_load.run(args, rows.append)
    assert rows == ([] if late is None else [{"backend": "a", "compiled_in_loads": late}])
    report = Report("serve", "", {}, {"heads": [128]}, rows)
    report.write_json(tmp_path)
    assert Report.read(tmp_path / "serving.json").rows == rows


@pytest.mark.parametrize("together", [False, True])
def test_servers_one_behind_the_other_share_the_time(monkeypatch, together):
    import serve_load

    clock, until = [0.0], []

    def run(servers):
        until.append(runner.deadline)
        clock[0] += 10.0  # of 90: what it leaves is for all that come

    runner = MagicMock(run=run, failed=lambda *_: False)
    monkeypatch.setattr(serve_load, "Runner", lambda *_: runner)
    monkeypatch.setattr(serve_load, "Server", MagicMock())
    monkeypatch.setattr(serve_load, "nvidia_smi", lambda *_, **__: ["a GPU"])
    monkeypatch.setattr(serve_load, "server_options", lambda *_: [])
    monkeypatch.setattr(serve_load.time, "monotonic", lambda: clock[0])
    args = MagicMock(
        backends=["a", "b", "c"], together=together, time_limit=90.0, shapes=[], reduced=False
    )
    serve_load.run(args, lambda _: None)
    assert until == ([90.0] if together else [30.0, 50.0, 90.0])


@pytest.mark.parametrize("together", [False, True])
def test_a_server_without_time_is_not_started(together, monkeypatch):
    """But each of its loads is told, once for all its repetitions."""
    import serve_load
    from ending import shortage
    from serve import parse_arguments

    clock, started, rows = [0.0], [], []

    def run(runner, servers):
        clock[0] += 100.0

    def server(backend, *_):
        started.append(backend)
        return MagicMock()

    for name in ("prepare", "warm_up"):
        monkeypatch.setattr(serve_load.Runner, name, lambda *_: None)
    for name in ("failed", "ready"):
        monkeypatch.setattr(serve_load.Runner, name, lambda *_: False)
    monkeypatch.setattr(serve_load.Runner, "run", run)
    monkeypatch.setattr(serve_load, "Server", server)
    monkeypatch.setattr(serve_load, "nvidia_smi", lambda *_, **__: [["a GPU"]])
    monkeypatch.setattr(serve_load, "gpu_memory_gib", lambda _: None)
    monkeypatch.setattr(serve_load.time, "monotonic", lambda: clock[0])
    words = "--backends a b c --time-limit 90 --shapes 8/8 --concurrency 4 --repetitions 2"
    args = parse_arguments([*words.split(), *["--together"] * together])
    serve_load.run(args, rows.append)
    assert started == (["a", "b", "c"] if together else ["a"])
    each = [{"loop": "closed", "concurrency": 4}, *[{"loop": "open", "rate": None}] * 2]
    late = [] if together else [
        {"backend": backend, "shape": "8/8", **load, "not_run": "no time was left"}
        for backend in "bc"
        for load in each
    ]  # fmt: skip
    assert rows == late
    assert shortage(rows) == ("" if together else "Not whole: no time was left for 6 rows.")


def test_servers_that_run_together_share_the_gpu():
    import serve_load
    from serve import parse_arguments
    from serve_cases import Load, Shape

    loads = [Load(Shape(2000, 500), 4), Load(Shape(100, 100), 32), Load(Shape(8, 8), share=0.5)]
    backends = ["--backends", "CUSTOM", "FLASHMLA", "TRITON_MLA"]
    for words, share, gib in (
        ("", "0.900", None),  # alone: all that is left of the GPU
        ("--cache-gib 2", "0.900", 2),
        ("--together", "0.300", 19),
        ("--together --cache-gib 2", "0.300", 2),
    ):
        args = parse_arguments([*backends, *words.split()])
        words = serve_load.server_options(args, loads, args.model)
        options = dict(itertools.pairwise(words))
        assert options["--gpu-memory-utilization"] == share
        assert options.get("--kv-cache-memory-bytes") == (str(gib << 30) if gib else None)
        assert int(options["--max-model-len"]) >= 2500 and options["--max-num-seqs"] == "32"


def test_memory_of_a_gpu_is_that_of_the_servers_own_processes(monkeypatch):
    import serve_load

    said = [["7", "1024"], ["8", "512"], ["9", "4096"], ["8", "[N/A]"], ["No running processes"]]
    monkeypatch.setattr(serve_load, "nvidia_smi", lambda *_, of: said)
    assert serve_load.gpu_memory_gib({7, 8}) == 1.5
    assert serve_load.gpu_memory_gib({5}) is None
