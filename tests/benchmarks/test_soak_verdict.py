# SPDX-License-Identifier: Apache-2.0
"""benchmarks/soak.py without a server: its verdict, and the page that it writes."""

import asyncio
import json
import math
import os
import signal
from collections import Counter
from dataclasses import replace
from pathlib import Path
from unittest.mock import AsyncMock, MagicMock

import httpx
import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
V3 = str(BENCHMARKS.parent / "configs" / "models" / "deepseek-v3-5-layers")


def sound_ledger():
    from soak_ledger import OUTCOMES, Ledger

    samples = [
        {"time_s": 5.0 * i, "kv_cache_usage": 0.9, "server_mib": 900.0, "engine_mib": 3000.0}
        for i in range(80)
    ]
    return Ledger(Counter(dict.fromkeys(OUTCOMES, 10)), samples)


def sound_end():
    from soak_ledger import End

    return End(
        blocks_used=0,
        requests_in_engine=0,
        kv_cache_usage=0.0,
        preemptions=3,
        health=200,
        tracebacks=0,
        corrupted=0,
        same_probes=True,
    )


def test_a_sound_soak_in_one_line():
    from soak_ledger import summary_line, verdict

    ledger, end = sound_ledger(), sound_end()
    assert verdict(ledger, end) == []
    assert verdict(ledger, replace(end, corrupted=None)) == []
    assert summary_line(30.0, ledger, end, []) == (
        "soak: 30.0 min, 40 requests (10 answered, 10 left by the client, 10 bad and refused, "
        "10 probes), 3 preemptions, no error, no leak, no NaN"
    )


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"blocks_used": 2}, "2 cache blocks leaked"),
        ({"kv_cache_usage": 0.004}, "cache blocks leaked"),
        ({"requests_in_engine": 1}, "still in the engine"),
        ({"preemptions": 0}, "no request was preempted"),
        ({"health": 503}, "/health says 503"),
        ({"tracebacks": 1}, "1 tracebacks"),
        ({"corrupted": 4}, "4 requests had NaN"),
        ({"same_probes": False}, "otherwise than before"),
        ({"gpu_leak_mib": 17.0}, "17.0 MiB more of the GPU"),
    ],
)
def test_what_is_wrong_at_the_end(change, says):
    from soak_ledger import summary_line, verdict

    end = replace(sound_end(), **change)
    (wrong,) = verdict(sound_ledger(), end)
    assert says in wrong
    assert f"FAILED: {wrong}" in summary_line(1, sound_ledger(), end, [wrong])


def test_a_server_that_is_gone():
    from soak_ledger import summary_line, verdict

    wrong = verdict(sound_ledger(), None)
    assert wrong == ["the server has no sound end state"]
    ledger = sound_ledger()
    ending = "preemptions, FAILED: the server has no sound end state"
    assert f"? {ending}" in summary_line(1, ledger, None, wrong)
    ledger.samples[-1]["preemptions"] = 7
    assert f"7 {ending}" in summary_line(1, ledger, None, wrong)


def test_faults_are_counted_and_the_first_ones_kept():
    from soak_ledger import KEPT_FAULTS, summary_line, verdict

    ledger = sound_ledger()
    for i in range(KEPT_FAULTS + 5):
        ledger.fault(f"fault {i}")
    wrong = verdict(ledger, sound_end())
    assert wrong[0] == "fault 0" and wrong[-1] == "and 5 more faults"
    line = summary_line(1, ledger, sound_end(), wrong)
    assert line.endswith(f"FAILED: fault 0 (and {KEPT_FAULTS} more)")


def test_faults_of_watching_are_no_requests():
    from soak_ledger import summary_line

    ledger = sound_ledger()
    ledger.fault("/health said 503 under load")
    ledger.request_failed("completion: no end after 600 s")
    line = summary_line(1, ledger, sound_end(), ledger.faults)
    assert line.startswith("soak: 1.0 min, 41 requests (10 answered,")
    assert line.endswith("FAILED: /health said 503 under load (and 1 more)")


@pytest.mark.parametrize("outcome", ["done", "left", "refused", "probes"])
def test_a_soak_that_tried_less_fails(outcome):
    from soak_ledger import OUTCOMES, verdict

    ledger = sound_ledger()
    del ledger.outcomes[outcome]
    assert verdict(ledger, sound_end()) == [f"no request was {OUTCOMES[outcome]}"]


@pytest.mark.parametrize("name", ["server_mib", "engine_mib", "gpu_mib"])
def test_memory_may_grow_at_first_only(name):
    from soak_ledger import growth_mib, verdict

    ledger = sound_ledger()
    for i, row in enumerate(ledger.samples):
        row[name] = 1000.0 + 100 * min(i, 39) + 500 * (i % 3)  # steps come and go
    assert growth_mib(ledger.samples, name) == 0
    assert verdict(ledger, sound_end()) == []
    for i, row in enumerate(ledger.samples):
        row[name] = 1000.0 + 3 * max(i - 39, 0) + 500 * (i % 3)
    assert growth_mib(ledger.samples, name) == pytest.approx(120, abs=20)
    (wrong,) = verdict(ledger, sound_end())
    assert f"grew by {growth_mib(ledger.samples, name):.0f} MiB" in wrong


def test_where_tensors_are_counted_what_torch_keeps_is_no_leak():
    from soak_ledger import verdict

    ledger = sound_ledger()
    for i, row in enumerate(ledger.samples):
        row["gpu_mib"] = 9000.0 + 50 * i
    assert "memory of the GPU grew" in verdict(ledger, sound_end())[0]
    assert verdict(ledger, replace(sound_end(), gpu_leak_mib=3.0)) == []


def test_memory_of_tensors_is_asked_of_all_workers():
    from soak import gpu_mib

    def info(*workers):
        return {"attention": {"workers": list(workers)}}

    assert gpu_mib(info({"gpu_bytes": 2**20}, {"gpu_bytes": 2**21})) == 3.0
    assert gpu_mib(info({"gpu_bytes": 2**20}, {"gpu_bytes": None})) is None
    assert gpu_mib(info({})) is None
    assert gpu_mib(info()) is None
    assert gpu_mib({"attention": {"workers": None}}) is None


def test_too_few_samples_tell_nothing():
    from soak_ledger import verdict

    ledger = sound_ledger()
    ledger.samples = ledger.samples[:7]
    assert verdict(ledger, sound_end()) == ["7 samples of memory tell nothing"]


@pytest.mark.parametrize("told", [range(77, 80), range(79)], ids=["late", "not at last"])
def test_memory_that_not_every_sample_tells(told):
    """nvidia-smi fails at times."""
    from soak_ledger import verdict

    ledger = sound_ledger()
    for i in told:
        ledger.samples[i]["gpu_mib"] = 9000.0 + 50 * i
    (wrong,) = verdict(ledger, sound_end())
    few = "3 samples of memory of the GPU tell nothing"
    assert wrong == few if len(told) == 3 else "memory of the GPU grew" in wrong


@pytest.mark.parametrize("alive", [True, False])
def test_the_page(alive):
    from dataclasses import asdict

    from outputs import command
    from soak import parse_arguments
    from soak_report import counts_of, markdown

    args = vars(parse_arguments(["--minutes", "1", "--dtype", "float32"]))
    assert args["blocks"] == 1 + 141
    page = markdown(
        {
            "line": "soak: all well",
            "wrong": [] if alive else ["the server has no sound end state"],
            "command": command("soak", ["--minutes", "1", "--results", "there", "--eager"]),
            "machine": {"cpu": "C", "vllm": "1", "torch": "2"},
            "model": "demo v3",
            "settings": args,
            "counts": counts_of(sound_ledger()),
            "end": asdict(sound_end()) if alive else None,
            "samples": sound_ledger().samples,
        }
    )
    assert "`python benchmarks/soak.py --minutes 1 --eager`" in page
    assert "| engine | 3000 | 3000 | 3000 | 3000 | +0.0 |" in page
    assert "GPU" not in page
    assert ("* WRONG: the server has no sound end state" in page) != alive
    assert f"before and after: {'yes' if alive else '?'}" in page


def test_how_far_probes_moved():
    from soak_ledger import KEPT_PROBES
    from soak_report import counts_of

    ledger = sound_ledger()
    for i in range(50):
        ledger.saw_probe(i, [0.01 * i, 0.0], None)
    ledger.saw_probe(700, [], 0.5)
    counts = counts_of(ledger)
    expected = {"tokens": 100, "median": 0.0, "99 of 100": 0.49, "largest": 0.49}
    assert counts["moves"] == expected
    assert (counts["other_tokens"], counts["widest_gap"]) == (1, 0.5)
    assert len(counts["widest_moves"]) == KEPT_PROBES
    assert counts["widest_moves"][0] == (49, [0.49, 0.0])


def test_a_soak_that_is_killed_leaves_what_it_had_seen(tmp_path):
    from soak import describe, parse_arguments
    from soak_report import Report

    words = ["--minutes", "1", "--dtype", "float32", "--results", str(tmp_path)]
    config = {"num_attention_heads": 16, "num_hidden_layers": 4}
    report = Report(tmp_path, describe(parse_arguments(words), config, words))
    report.so_far(31.0, sound_ledger())
    left = json.loads((tmp_path / "soak_partial.json").read_text())
    assert left["line"].endswith("FAILED: the soak did not come to its end")
    assert (left["end"], left["counts"]["outcomes"]["done"]) == (None, 10)
    assert "soak: 31.0 min, 40 requests" in (tmp_path / "soak_partial.md").read_text()
    assert not list(tmp_path.glob("soak.*"))


def test_a_short_soak_does_not_replace_a_whole_one(tmp_path):
    from soak import describe, parse_arguments
    from soak_report import Report

    config = {"num_attention_heads": 16, "num_hidden_layers": 4}
    report = Report(tmp_path, describe(parse_arguments([]), config, []))

    def lines(minutes):
        assert report.write(minutes, sound_ledger(), sound_end(), []).endswith("no NaN")
        pages = {path.stem: path.read_text().split("\n")[2] for path in tmp_path.glob("*.md")}
        assert {path.stem for path in tmp_path.glob("*.json")} == set(pages)
        return {name: page.split(",")[0].strip() for name, page in pages.items()}

    assert lines(29.9) == {"soak_partial": "soak: 29.9 min"}
    assert lines(30.1) == {"soak": "soak: 30.1 min"}
    assert lines(1.0) == {"soak": "soak: 30.1 min", "soak_partial": "soak: 1.0 min"}


def test_the_log_of_an_earlier_soak_does_not_stay_beside_other_results(tmp_path):
    from soak import describe, parse_arguments
    from soak_report import Report

    config = {"num_attention_heads": 16, "num_hidden_layers": 4}
    report, log = Report(tmp_path, describe(parse_arguments([]), config, [])), tmp_path / "x"
    log.write_text("Traceback")

    def logs():
        return sorted(path.name for path in tmp_path.glob("*.log"))

    whole, short = "soak-server.log", "soak_partial-server.log"
    report.keep_log(30.0, log)
    assert logs() == [whole] and (tmp_path / whole).read_text() == "Traceback"
    report.keep_log(1.0, log)
    assert logs() == [whole, short]
    report.so_far(0.5, sound_ledger())  # its page is soak_partial.md
    assert logs() == [whole]
    report.keep_log(1.0, log)
    report.keep_log(1.0, None)
    assert logs() == [whole]
    report.keep_log(1.0, log)
    report.keep_log(30.0, None)
    assert logs() == []


@pytest.mark.parametrize("sound", [True, False])
def test_a_soak_keeps_the_log_of_what_was_wrong(sound, monkeypatch, terminate, tmp_path):
    import soak

    async def loaded(*_):
        return 31.0, sound_ledger(), sound_end() if sound else None

    def start(backend, model, options, log):
        log.write_text("this soak's")
        return MagicMock()

    monkeypatch.setattr(soak, "Server", start)
    monkeypatch.setattr(soak, "soak", loaded)
    (tmp_path / "soak-server.log").write_text("an earlier one's")
    assert soak.main(["--model", V3, "--results", str(tmp_path)]) == (not sound)
    kept = {path.name: path.read_text() for path in tmp_path.glob("*.log")}
    assert kept == ({} if sound else {"soak-server.log": "this soak's"})


def test_a_server_that_does_not_start_is_a_fault(monkeypatch, terminate, tmp_path, capsys):
    """Said in a line and kept with its log, as what is wrong later is."""
    import soak
    from servers import StartError

    def start(backend, model, options, log):
        log.write_text("why, at length")
        server = MagicMock()
        server.__enter__.return_value = server
        server.wait_ready.side_effect = StartError("ours did not start: ValueError: why")
        server.__exit__ = lambda *_: None
        return server

    monkeypatch.setattr(soak, "Server", start)
    assert soak.main(["--model", V3, "--results", str(tmp_path)]) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert "FAILED: ours did not start: ValueError: why (and " in last
    assert json.loads((tmp_path / "soak_partial.json").read_text())["line"] == last
    assert (tmp_path / "soak_partial-server.log").read_text() == "why, at length"
    assert not list(tmp_path.glob("soak.*"))


@pytest.mark.parametrize(
    ("moves", "gap", "says"),
    [
        ([0.9] + [0.2] * 31, 1.9, None),
        ([0.9, 0.9], None, None),  # too few for a typical one
        ([1.1] + [0.0] * 31, None, "a logprob moved by 1.1, token 0 of 32 alike"),
        ([0.3] * 20 + [0.0] * 12, None, "half of 32 logprobs moved by 0.3"),
        ([0.0] * 3, 2.1, "another token that was 2.1 below"),
        ([], math.inf, "another token that was inf below"),
    ],
)
def test_what_rounding_does_not_explain_is_a_fault(moves, gap, says):
    from soak_ledger import moved_too_far

    assert moved_too_far(moves, gap, tolerance=1.0) == says


def test_a_token_that_was_no_alternative_is_said_in_json_and_in_words(tmp_path):
    from soak import describe, parse_arguments
    from soak_report import Report

    config = {"num_hidden_layers": 2, "num_attention_heads": 16}
    report, ledger = Report(tmp_path, describe(parse_arguments([]), config, [])), sound_ledger()
    ledger.saw_probe(700, [], math.inf)
    report.so_far(1.0, ledger)
    text = (tmp_path / "soak_partial.json").read_text()
    assert json.loads(text, parse_constant=pytest.fail)["counts"]["widest_gap"] is None
    page = (tmp_path / "soak_partial.md").read_text()
    assert "another token, of which one was not among the alternatives. Allowed" in page


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--overrides", "[]"], "expected a JSON object, got []"),
        (["--overrides", "{a"], "expected a JSON object, got '{a'"),
        (["--overrides", '{"nope": 1}'], "--overrides: no such key in config.json of v3: nope"),
        (
            ["--model", V3, "--overrides", '{"num_hidden_layers": 2}'],
            f'expected --model or --overrides, which are of the demo model, got {V3} and {{"num_',
        ),
        (["--model", "/nowhere"], "there is no /nowhere/config.json"),
        (["--tolerance", "nan"], "expected 0 or more, got nan"),
        (["--tolerance", "-1"], "expected 0 or more, got -1"),
        (["--minutes", "nan"], "expected a number above 0, got nan"),
        (["--minutes", "-5"], "expected a number above 0, got -5"),
        (["--sample-seconds", "0"], "expected a number above 0, got 0"),
    ],
)
def test_bad_arguments_are_said_before_anything_starts(words, said, capsys):
    from soak import parse_arguments

    with pytest.raises(SystemExit):
        parse_arguments(words)
    assert said in capsys.readouterr().err


def test_a_tolerance_of_nothing_is_none():
    from soak import TOLERANCE, parse_arguments

    assert parse_arguments(["--tolerance", "0"]).tolerance == 0
    assert parse_arguments(["--dtype", "float32"]).tolerance == TOLERANCE["float32"]


METRICS = """vllm:kv_cache_usage_perc 0.5
vllm:num_requests_running 3.0
vllm:num_requests_waiting 0.0
vllm:num_preemptions_total 2.0
"""


def test_a_server_that_says_nothing_more_is_a_fault_of_every_sample():
    """The watcher goes on: it may say more later."""
    from soak import Watch
    from soak_ledger import Ledger

    ledger = Ledger()
    calls = Counter()

    def answer(request):
        path = request.url.path
        calls[path] += 1
        mute = 3 <= calls[path] <= 4
        if path == "/health":
            return httpx.Response(500 if mute else 200)
        return httpx.Response(200, text="" if mute else METRICS)

    async def watch():
        transport = httpx.MockTransport(answer)
        async with httpx.AsyncClient(base_url="http://server", transport=transport) as http:
            task = asyncio.create_task(Watch(http, os.getpid(), ledger).run(0.0, MagicMock()))
            while calls["/health"] < 7 and not task.done():
                await asyncio.sleep(0.01)
            task.cancel()
            return await asyncio.gather(task, return_exceptions=True)

    (how,) = asyncio.run(watch())
    assert isinstance(how, asyncio.CancelledError)
    unread = "the server cannot be watched: KeyError: 'vllm:kv_cache_usage_perc'"
    assert ledger.faults == ["/health said 500 under load", unread] * 2
    assert len(ledger.samples) >= 4


@pytest.fixture
def terminate():
    """The handler of SIGTERM is put back."""
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGHUP)
    yield
    signal.signal(signal.SIGTERM, before[0])
    signal.signal(signal.SIGHUP, before[1])


@pytest.mark.parametrize("error", [None, RuntimeError("gone"), OSError("disk full")])
def test_a_watcher_that_ended_early_is_a_fault(monkeypatch, terminate, error):
    import soak

    async def work(rng, ended, pause):
        await ended.wait()

    async def run(every, report):
        if error:
            raise error
        await asyncio.sleep(100)

    client = MagicMock(work=work, probe_idle=AsyncMock(return_value=[]))
    watch = MagicMock(run=run, metrics=AsyncMock(return_value={}))
    watch.info = AsyncMock(return_value={"attention": {"workers": None}})
    monkeypatch.setattr(soak, "Client", lambda *_: client)
    monkeypatch.setattr(soak, "Watch", lambda *_: watch)
    monkeypatch.setattr(soak, "final_state", AsyncMock(return_value=sound_end()))
    args = soak.parse_arguments(["--minutes", "0.001", "--concurrency", "2"])
    server = MagicMock(url="http://server", pid=1)
    _, ledger, end = asyncio.run(soak.soak(server, args, MagicMock(), MagicMock()))
    assert end == sound_end()
    if error:
        (fault,) = ledger.faults
        assert f"to its end: {type(error).__name__}: {error}" in fault
    else:
        assert ledger.faults == []


@pytest.mark.parametrize("hangs", ["before", "after"])
def test_a_server_that_hangs_when_idle_ends_the_soak(monkeypatch, terminate, hangs):
    """The clients of the load have a clock of their own; these had none."""
    import soak

    async def work(rng, ended, pause):
        await ended.wait()

    async def settle(watch):
        await watch.http.get("/mla/info")

    async def run():
        mute = await asyncio.start_server(lambda *_: asyncio.sleep(100), "127.0.0.1", 0)
        url = f"http://127.0.0.1:{mute.sockets[0].getsockname()[1]}"
        server = MagicMock(url=url, pid=os.getpid())
        return await asyncio.wait_for(soak.soak(server, args, scope, MagicMock()), 20)

    args = soak.parse_arguments(["--minutes", "0.001", "--concurrency", "1"])
    scope = soak.Scope(args.max_model_len, 8, 200)
    monkeypatch.setattr(soak, "REQUEST_SECONDS", 0.3)
    monkeypatch.setattr(soak.Watch, "settle", settle)
    monkeypatch.setattr(soak.Watch, "run", lambda *_: asyncio.sleep(100))
    if hangs == "after":
        monkeypatch.setattr(soak.Client, "probe_idle", AsyncMock(return_value=[]))
        monkeypatch.setattr(
            soak.Client, "work", lambda self, *words, **named: work(*words, **named)
        )
        monkeypatch.setattr(soak.Watch, "metrics", AsyncMock(return_value={}))
        monkeypatch.setattr(soak.Watch, "info", AsyncMock(return_value=INFO))
    _, ledger, end = asyncio.run(run())
    assert end is None
    assert ledger.faults[0].startswith(f"{hangs} the load: ReadTimeout")


INFO = {"attention": {"workers": None}}


def test_a_soak_that_is_told_to_end_again_takes_its_server_along(monkeypatch, terminate, tmp_path):
    """After the load too, while the server stops: asyncio takes its own handler away."""
    import soak

    async def loaded(*_):
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, lambda: None)
        return 1.0, sound_ledger(), sound_end()

    handlers = []
    server = MagicMock()
    server.__enter__.return_value = server
    server.__exit__ = lambda *_: handlers.append(signal.getsignal(signal.SIGTERM))
    monkeypatch.setattr(soak, "Server", lambda *_: server)
    monkeypatch.setattr(soak, "soak", loaded)
    assert soak.main(["--model", V3, "--results", str(tmp_path)]) == 0
    with pytest.raises(SystemExit):
        handlers[0](signal.SIGTERM, None)
