# SPDX-License-Identifier: Apache-2.0
"""Decode steps in engines: their turns, what is timed of them and what they are given."""

import io
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"


def test_kernels_are_told_apart_by_name_and_overlaps_count_once():
    from step_worker import covered, kernel_times

    assert covered([(5, 6), (0, 2), (1, 3), (1, 2)]) == 4
    kernels = [
        ("nvjet_sm90_tst_128x64", 0, 900),
        ("plan_kernel", 850, 950),  # launched before the product has ended: 50 of its own
        ("hopper_decode_kernel", 950, 1500),
        ("merge_kernel", 1000, 1550),  # waits for the kernel before it
        ("write_kv_cache_kernel", 1600, 1800),
        ("void flash::FlashAttnFwdSm90<...>", 1800, 1900),
        ("_fwd_grouped_kernel_stage1", 1900, 2000),
    ]
    row = kernel_times(kernels, 10)
    assert row["gpu_ms"] == pytest.approx(0.195)
    assert row["attention_ms"] == pytest.approx(0.085)
    assert row["attention_share"] == pytest.approx(850 / 1950)
    kernels = [("hopper_fp8_query_kernel", 0, 100), ("scaled_fp8_quant_kernel", 100, 110)]
    assert kernel_times(kernels, 1)["attention_ms"] == pytest.approx(0.1)
    assert next(iter(row["top_kernels_us"])) == "nvjet_sm90_tst_128x64"


@pytest.mark.parametrize(
    ("kernel", "attention"),
    [
        ("void vllm::moe::topkGating<8, 64, 4, 16, 32, int>(float const*)", False),
        ("void vllm::moe::grouped_topk_fused_kernel<float, int>(float*)", False),
        ("_combine_sampled_and_draft_tokens_kernel", False),
        ("_topk_topp_kernel", False),
        ("void vllm::cooperative::cooperative_topk_cs8<2048u>(float*)", True),
        ("spread_topk_kernel", True),
        ("void cutlass::device_kernel<flash::FlashAttnFwdCombine<cute::tuple<>>>", True),
        ("void smxx::decode::flash_fwd_mla_combine_kernel<cutlass::bfloat16_t>", True),
        ("nvjet_sm90_tst_128x64", False),
    ],
)
def test_experts_and_sampling_are_no_attention(kernel, attention):
    from step_worker import kernel_times

    ms = kernel_times([(kernel, 0, 100), ("write_kv_cache_kernel", 100, 110)], 1)["attention_ms"]
    assert ms == pytest.approx(0.1 * attention)


class FakeEngine:
    """Steps of 1 ms, of 2 ms in the first round."""

    def __init__(self, backend, ready, logprob=-0.5):
        self.backend = backend
        self.ready = ready
        self.said = {"answers": [[{"5": logprob}]]}
        self.asked = []
        self.log = Path(__file__)

    def tell(self, do, **command):
        self.asked.append((do, *command.values()))

    def answer(self):
        do = self.asked[-1][0]
        if do == "build":
            return self.ready
        if do == "say":
            return self.said
        if do == "time":
            timed = [asked for asked in self.asked if asked[0] == "time"]
            return {"ms": [1.0 + len(timed) % 2] * 9 + [7.0]}
        return {"gpu_ms": 0.5} if do == "profile" else {}

    def ask(self, do, **command):
        self.tell(do, **command)
        return self.answer()


def test_engines_take_turns_and_what_is_not_run_is_said():
    from step_driver import measure

    rows, times = [], []

    def save(row):
        if not any(row is there for there in rows):
            rows.append(row)
        times.append([there.get("gpu_ms") for there in rows if "step_ms" in there])

    good, bad = FakeEngine("CUSTOM", {"blocks": 7}), FakeEngine("FLASHMLA", {"error": "no GPU"})
    how = {"group": {"heads": 16, "layers": 2}, "steps": 5, "seconds": 1.0, "save": save}
    how["nats"] = 0.1
    measure([good, bad], [(1, 1024), (8, 4096)], deadline=time.monotonic() + 60, **how)
    assert bad.asked == [("build",)]
    timed = [("time", 5, 1.0)] * 6
    assert good.asked == [
        ("build",), ("say",),
        ("start", 1, 1024), *timed, ("stop",), ("start", 8, 4096), *timed, ("stop",),
        ("start", 1, 1024), ("profile",), ("stop",), ("start", 8, 4096), ("profile",), ("stop",),
    ]  # fmt: skip
    # GPU times are told as they come: who is killed among them has those that were measured.
    assert times[2:] == [[None], [None, None], [0.5, None], [0.5, 0.5]]
    assert rows[0] == {"heads": 16, "layers": 2, "backend": "FLASHMLA", "error": "no GPU"}
    assert rows[1] == {"heads": 16, "layers": 2, "backend": "CUSTOM", "nats_from_first": None}
    assert (rows[3]["batch"], rows[3]["context"], rows[3]["gpu_ms"]) == (8, 4096, 0.5)
    assert sorted(rows[2]["rounds_ms"]) == [1.0] * 3 + [2.0] * 3 and rows[2]["step_ms"] == 1.0
    assert rows[2]["mean_ms"] == pytest.approx(1.6)
    assert rows[2]["out_tok_s"] == pytest.approx(1e3 / 1.6)


def test_engines_without_time_are_not_built():
    """But each of their cases is told."""
    from step_driver import measure

    engines, rows = [FakeEngine(name, {"blocks": 7}) for name in "AB"], []
    group = {"heads": 16, "layers": 2}
    how = {"group": group, "nats": 0.1, "steps": 5, "seconds": 1.0, "save": rows.append}
    measure(engines, [(1, 1024), (8, 4096)], deadline=time.monotonic() - 1, **how)
    assert [engine.asked for engine in engines] == [[], []]
    assert rows == [
        {**group, "batch": b, "context": c, "backend": name, "not_run": "no time was left"}
        for b, c in ((1, 1024), (8, 4096))
        for name in "AB"
    ]


def test_cases_without_time_are_told_by_engines_that_ran(monkeypatch):
    import step_driver

    clock, engine, rows = [0], FakeEngine("A", {"blocks": 7}), []

    def save(row):
        rows.append(row)
        clock[0] += 2 * ("step_ms" in row)

    monkeypatch.setattr(step_driver.time, "monotonic", lambda: clock[0])
    how = {"group": {}, "nats": 0.1, "steps": 5, "seconds": 1.0, "save": save}
    step_driver.measure([engine], [(1, 1024), (8, 4096)], deadline=1, **how)
    late = {"batch": 8, "context": 4096, "backend": "A", "not_run": "no time was left"}
    assert rows[2] == late and "step_ms" in rows[1]


def test_steps_without_time_for_a_profile_are_no_whole_page(tmp_path, monkeypatch):
    import serve
    import serve_steps
    import step_driver

    clock, engine = [0], FakeEngine("CUSTOM", {"blocks": 7})
    how = {"group": {"heads": 16, "layers": 2}, "nats": 0.1, "steps": 5, "seconds": 1.0}

    def run(args, save):
        def saved(row):
            save(row)
            clock[0] += 2 * ("gpu_ms" in row)

        step_driver.measure([engine], [(1, 1024), (8, 4096)], deadline=1, save=saved, **how)

    monkeypatch.setattr(step_driver.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(serve_steps, "run", run)
    monkeypatch.setattr(serve, "exit_on_signals", lambda: None)
    assert serve.main(["--mode", "steps", "--results", str(tmp_path)]) == 0
    result = json.loads((tmp_path / "engine_steps_partial.json").read_text())
    assert [row.get("not_profiled") for row in result["rows"]] == [None, None, "no time was left"]
    assert [row.get("gpu_ms") for row in result["rows"]] == [None, 0.5, None]
    page = (tmp_path / "engine_steps_partial.md").read_text()
    assert "\nNot whole: no time was left to profile 1 rows.\n" in page
    assert not (tmp_path / "engine_steps.md").exists()


WORKER = """
import json, sys, time
print(json.dumps({"imported": True}), flush=True)
for line in sys.stdin:
    if json.loads(line)["do"] == "hang":
        time.sleep(300)
    print(json.dumps({"done": True}), flush=True)
"""


def test_an_engine_that_hangs_is_killed_and_the_others_go_on(tmp_path, monkeypatch):
    import step_driver

    (tmp_path / "worker.py").write_text(WORKER)
    monkeypatch.setattr(step_driver, "ANSWER_SECONDS", 20)
    engine = step_driver.Engine("A", {}, tmp_path / "log", tmp_path / "worker.py")
    try:
        assert engine.answer() == {"imported": True} and engine.ask("time") == {"done": True}
        monkeypatch.setattr(step_driver, "ANSWER_SECONDS", 0.5)
        begin = time.monotonic()
        said = engine.ask("hang", seconds=0.5)
        assert said == {"error": "the engine has given no answer in 1 s"}
        assert 1 <= time.monotonic() - begin < 10
        assert "the engine has died" in engine.ask("stop")["error"]
        (tmp_path / "log").write_text("CUDA error: Error 7\nframe #0: c10::Error::Error()\n")
        assert engine.ask("stop") == {"error": "the engine has died: CUDA error: Error 7"}
    finally:
        engine.kill()


def test_an_engine_that_differs_is_only_asked():
    from step_driver import measure

    engines = [FakeEngine(*one) for one in (("A", {}), ("B", {}, -0.7), ("C", {}, -0.55))]
    rows = []
    how = {"group": {}, "nats": 0.1, "steps": 5, "seconds": 1.0, "save": rows.append}
    measure(engines, [(1, 1024)], deadline=time.monotonic() + 60, **how)
    assert engines[1].asked == [("build",), ("say",)]
    # Each once more when it has its GPU times.
    assert [row["backend"] for row in rows if "step_ms" in row] == ["A", "C", "A", "C"]


def test_engines_swap_places_in_each_round():
    """So that none always follows the same one."""
    from step_driver import measure

    turns, engines = [], [FakeEngine(name, {"blocks": 7}) for name in ("A", "B", "C")]
    for engine in engines:
        tell = engine.tell
        engine.tell = lambda do, *, of=engine.backend, tell=tell, **command: (
            turns.append(of) if do == "time" else None,
            tell(do, **command),
        )
    how = {"group": {}, "nats": 0.1, "steps": 5, "seconds": 1.0, "save": lambda row: None}
    measure(engines, [(1, 1024)], deadline=time.monotonic() + 60, **how)
    assert turns == ["C", "B", "A", "A", "B", "C"] * 3


@pytest.mark.parametrize("fails", [False, True])
def test_an_engine_answers_when_its_gpu_is_idle(monkeypatch, fails):
    import step_worker

    done = []
    worker = step_worker.Worker({})
    monkeypatch.setattr(step_worker, "synchronize", lambda: done.append("idle"))

    def work(command):
        done.append("work")
        if fails:
            raise RuntimeError("out of memory")
        return {}

    monkeypatch.setattr(worker, "_do", work)
    if fails:
        with pytest.raises(RuntimeError, match="out of memory"):
            worker.answer({"do": "time"})
    else:
        assert worker.answer({"do": "time"}) == {}
    assert done == ["work", "idle"]


def test_engines_get_their_environment(tmp_path, monkeypatch):
    import step_driver

    started = []

    class Process:
        stdin = stdout = io.StringIO()

    def popen(command, env, **_):
        started.append((json.loads(command[2])["engine"], env.get("MLA_BACKEND_FP8_QUERY")))
        return Process()

    monkeypatch.setattr(step_driver.subprocess, "Popen", popen)
    log, env = tmp_path / "log", {"MLA_BACKEND_FP8_QUERY": "1"}
    engine = step_driver.Engine("CUSTOM", {"seed": 0}, log, env=env, label="CUSTOM+fp8_query")
    assert engine.backend == "CUSTOM+fp8_query"
    assert started == [({"seed": 0, "attention_backend": "CUSTOM"}, "1")]


def test_pages_of_bytes_decode_to_numbers():
    from mla_kernels.cache.rows import rows_as_float
    from mla_kernels.indexer.reference import page_keys
    from step_fill import random_pages

    keys = page_keys(random_pages(2, 132, "cpu"), 1)
    rows = rows_as_float(random_pages(2, 656, "cpu")[1], torch.bfloat16, 512, 576).double()
    codes = random_pages(2, 576, "cpu").view(torch.float8_e4m3fn)
    fp8 = rows_as_float(codes, torch.bfloat16, 512, 576, 2.0**-3).double()
    for x in (keys, rows, fp8):
        assert torch.isfinite(x).all() and 0 < x.abs().max() < 1 and x.std() > 0
    with pytest.raises(ValueError, match=r"\[132, 576, 656\] bytes a token, got 100"):
        random_pages(1, 100, "cpu")


def test_the_round_with_the_lowest_median_counts():
    """Not the one with the fastest step, which may have slow ones beside it."""
    from step_driver import summary

    row = summary([[1.0, 9.0, 9.0], [4.0, 5.0, 9.0], [6.0, 6.0, 6.0]], batch=3)
    assert (row["step_ms"], row["mean_ms"], row["rounds_ms"]) == (5.0, 6.0, [9.0, 5.0, 6.0])
    assert row["out_tok_s"] == pytest.approx(500.0) and row["steps"] == 3


def test_p99_is_of_the_slow_steps():
    from step_driver import summary

    steps = [float(ms) for ms in range(201, 0, -1)]
    assert summary([steps, [500.0] * 201], 1)["p99_ms"] == 199.0
    assert summary([steps[:100]], 1)["p99_ms"] == 200.0
    assert "p99_ms" not in summary([steps[:99]], 1)  # it would be the slowest but one


@pytest.mark.engine
def test_steps_of_a_tiny_engine(demo_checkpoint, tmp_path):
    """Real decode steps on a CPU; a backend that vLLM does not have is reported, not fatal."""
    words = "--mode steps --as-is --eager --dtype float32 --steps 20 --case-seconds 60 "
    words += "--backends CUSTOM NO_SUCH --batches 3 --contexts 100 --cache-gib 0.05"
    command = [sys.executable, str(BENCHMARKS / "serve.py"), *words.split()]
    command += ["--model", str(demo_checkpoint("v3")), "--results", str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert run.returncode == 1, run.stderr[-2000:]  # that one backend failed is told
    name = f"engine_steps_{demo_checkpoint('v3').name}_partial.json"  # of some batches
    report = json.loads((tmp_path / name).read_text())
    failed, gate, timed = report["rows"]
    assert gate["backend"] == "CUSTOM" and gate["nats_from_first"] is None
    assert failed["backend"] == "NO_SUCH" and "NO_SUCH" in failed["error"]
    assert (timed["batch"], timed["context"], timed["steps"]) == (3, 100, 20)
    assert 0.1 < timed["step_ms"] < 2000
    assert timed["out_tok_s"] == pytest.approx(3e3 / timed["mean_ms"])
    assert str(tmp_path) not in report["command"]
