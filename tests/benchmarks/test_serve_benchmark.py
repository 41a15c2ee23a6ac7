# SPDX-License-Identifier: Apache-2.0
"""benchmarks/serve.py without a GPU: its cases, its timing loop on a tiny engine, its tables."""

import importlib
import io
import itertools
import json
import math
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"


def test_cases_come_in_the_order_of_the_list():
    from serve_cases import STEPS, step_cases

    assert step_cases(None, None) == list(STEPS)
    assert len(set(STEPS)) == 20
    asked = step_cases([1, 96, 7], [16384])
    assert asked == [(96, 16384), (1, 16384), (7, 16384)]
    assert len(step_cases(None, [1024, 4096])) == 10


def test_loads_come_in_the_order_of_what_they_take():
    from serve_cases import REDUCED, SHARES, Load, Shape, loads

    a, b = Shape(8, 8), Shape(90, 1)
    assert loads([a, b], [96, 4], [0.5], reduced=False) == [
        Load(a, 4), Load(b, 4), Load(a, rate=0.5), Load(a, 96), Load(b, rate=0.5), Load(b, 96),
    ]  # fmt: skip
    assert [load.share for load in loads([a], [4, 1], None, reduced=False)[2:]] == list(SHARES)
    assert loads([a], [4], None, reduced=True) == list(REDUCED)
    closed = [load.shape for load in REDUCED if load.concurrency]
    assert all(load.shape in closed for load in REDUCED if load.share)


@pytest.mark.parametrize("text", ["1024", "1024/", "a/b", "0/5", "1/2/3", "-1/4"])
def test_bad_shapes_are_refused(text):
    from serve_cases import Shape

    with pytest.raises(ValueError, match="expected PROMPT/ANSWER"):
        Shape.parse(text)


def test_overrides_are_a_rank_of_v3():
    from serve_cases import dense_overrides

    assert dense_overrides(6, 16) == {
        "num_hidden_layers": 6,
        "first_k_dense_replace": 6,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "intermediate_size": 2304,
    }
    assert dense_overrides(6, 128)["intermediate_size"] == 18432


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
    measure([good], [(1, 1024)], deadline=time.monotonic() - 1, **how)
    assert rows[5]["not_run"] == "no time was left" and len(rows) == 6


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


def test_large_caches_go_to_shallow_engines():
    from serve import parse_arguments
    from serve_steps import depths, engine_options

    words = "--mode steps --batches 8 128 --contexts 1024 65536 --steps 60 --cache-gib 19"
    args = parse_arguments(words.split())
    cases = [(8, 1024), (128, 1024), (8, 65536), (128, 16384), (128, 65536)]
    assert depths(args, 128, cases) == {12: cases[:3], 6: cases[3:4], 1: cases[4:]}
    assert depths(args, 16, cases) == {30: cases[:3], 8: cases[3:4], 2: cases[4:]}
    options = engine_options(args, 16, 1, cases[4:])
    assert options["hf_overrides"]["num_hidden_layers"] == 1
    few = engine_options(args, 16, 1, [(1, 64)])  # the gate's prompts find room
    assert few["max_model_len"] > 716 and few["kv_cache_memory_bytes"] > 1293 * 576 * 2
    assert 9 * 2**30 < options["kv_cache_memory_bytes"] < 10 * 2**30
    args.layers = [2, 12]
    assert depths(args, 16, cases) == {12: cases[:3], 2: cases[3:]}
    args.cache_gib = 1
    with pytest.raises(ValueError, match=r"\(128, 65536\) does not fit a cache of 1 GiB"):
        depths(args, 16, cases[4:])


def test_a_server_has_the_layers_of_its_heads():
    from serve import parse_arguments

    assert parse_arguments([]).layers == [12]
    assert parse_arguments(["--heads", "16"]).layers == [30]
    assert parse_arguments(["--heads", "16", "--layers", "4"]).layers == [4]


def step_row(backend, batch, ms, attention):
    times = {"step_ms": ms, "gpu_ms": ms * 0.9, "attention_ms": attention}
    key = {"heads": 128, "batch": batch, "context": 16384, "backend": backend}
    key |= {"layers": 2 if batch == 1 else 6, "rounds_ms": [ms, ms * (1.2 if batch == 1 else 1)]}
    return {**key, **times, "steps": int(200 / ms), "attention_share": attention / ms}


def test_report_of_steps(tmp_path):
    from serve import main, parse_arguments
    from serve_report import Report
    from serve_results import write_results

    settings = vars(parse_arguments(["--mode", "steps"])) | {"model": "m", "results": "", "slo": ""}
    settings = {k: v for k, v in settings.items() if isinstance(v, (str, int, float))}
    rows = [
        step_row("CUSTOM", 96, 8.0, 4.0),
        step_row("FLASHMLA", 96, 10.0, 6.0),
        step_row("TRITON_MLA", 96, 50.0, 45.0),
        step_row("CUSTOM", 1, 2.0, 0.4),
        step_row("FLASHMLA", 1, 1.0, 0.2),
        {"heads": 128, "batch": 8, "context": 65536, "backend": "CUSTOM", "not_run": "no time"},
    ]
    report = Report("steps", "python x", {"gpu": "G"}, settings, rows)
    write_results(report, tmp_path)
    page = (tmp_path / "engine_steps.md").read_text()
    assert "| 96 x 16384 | 8.000, 7.200, 4.000 | 10.000, 9.000, 6.000 |" in page
    assert "| 1.25 | 1.25 | 1.50 | 50% |" in page  # FLASHMLA over ours, not TRITON_MLA
    assert "| 0.50 | 0.50 | 0.50 | 20% |" in page
    assert "geometric mean 0.791, at least as fast in 1 of 2 cases" in page
    slower = "Steps slower than the best peer's: "
    assert f"{slower}1 x 16384 (GPU 0.50, our rounds 2.00 to 2.40 ms).\n" in page
    assert "| 1 x 16384 (2 layers) | 2.000" in page and "## 128 heads, 6 layers" in page
    shown = "mla-backend 25 to 100, FLASHMLA 20 to 200, TRITON_MLA 4"
    assert f"\nSteps in the round that is shown: {shown}.\n" in page
    assert "the host's doing: mla-backend 1 of 2, FLASHMLA 1 of 2, TRITON_MLA 0 of 1." in page
    assert "* backend CUSTOM heads 128 (batch 8 context 65536): no time" in page
    assert (tmp_path / "engine_steps.png").stat().st_size > 1000
    # A page that was given another name keeps it when it is rendered again.
    (tmp_path / "engine_steps.json").rename(tmp_path / "steps_v3.2.json")
    (tmp_path / "engine_steps.md").write_text("another run")
    assert main(["--report", str(tmp_path / "steps_v3.2.json")]) == 0
    assert (tmp_path / "steps_v3.2.md").read_text() == page
    assert (tmp_path / "steps_v3.2.png").stat().st_size > 1000
    assert (tmp_path / "engine_steps.md").read_text() == "another run"


def test_what_was_not_measured_is_said_once_an_engine_and_reason():
    from serve_results import left_out

    engine = {"heads": 128, "layers": 2, "backend": "B"}
    late = {"not_run": "no time was left"}
    assert left_out(
        [
            {**engine, "batch": 1, "context": 64, "step_ms": 2.5, "error": "lost\n\nadvice"},
            {**engine, "batch": 8, "context": 64, "step_ms": 2.5},
            {**engine, "batch": 9, "context": 64, "error": "lost\nother advice"},
            {"backend": "A", "shape": "8/8", "loop": "open", "rate": 2, **late},
            {"backend": "A", "error": "did not start"},
        ]
    ) == [
        "* backend B heads 128 layers 2 (batch 1 context 64; batch 9 context 64): lost",
        "* backend A (shape 8/8 loop open rate 2): no time was left",
        "* backend A: did not start",
    ]


def test_family_names_model_backends_and_results():
    from serve import parse_arguments
    from serve_report import Report
    from serve_results import markdown

    sparse, dense = (parse_arguments(["--family", name]) for name in ("v3.2", "v3"))
    assert "index_topk" in json.loads((sparse.model / "config.json").read_text())
    assert sparse.backends == ["CUSTOM", "FLASHMLA_SPARSE"] and sparse.heads == [128]
    assert len(dense.backends) == 4 and dense.heads == [128, 16] and dense.batches is None
    report = Report("steps", "", {}, vars(sparse) | {"model": "m"})
    assert report.stem == "sparse_steps" and "and the indexer" in markdown(report)
    assert "their share of the MLP" not in markdown(report)
    few = parse_arguments(["--family", "v3.2", "--heads", "16", "--kv-cache-dtype", "fp8_ds_mla"])
    report = Report("steps", "", {}, vars(few) | {"model": "m"})
    assert report.stem == "sparse_steps_fp8_ds_mla"
    assert "KV cache dtype fp8_ds_mla; fewer than 128 heads with their share" in markdown(report)


def test_an_fp8_cache_compares_ours_with_and_without_fp8_queries(tmp_path):
    from serve import parse_arguments
    from serve_cases import FP8_BACKENDS, engine_of
    from serve_report import Report
    from serve_results import markdown
    from serve_steps import token_bytes

    args = parse_arguments(["--mode", "steps", "--kv-cache-dtype", "fp8"])
    assert args.backends == list(FP8_BACKENDS) and "FLASH_ATTN_MLA" not in FP8_BACKENDS
    assert token_bytes(args, 6) == 6 * 576
    assert [engine_of(name) for name in FP8_BACKENDS] == [
        ("CUSTOM", {"MLA_BACKEND_FP8_QUERY": "0"}),
        ("CUSTOM", {"MLA_BACKEND_FP8_QUERY": "1"}),
        ("FLASHMLA", {}),
        ("TRITON_MLA", {}),
    ]
    settings = {k: v for k, v in vars(args).items() if isinstance(v, (str, int, float))}
    rows = [
        step_row(name, 96, ms, ms / 2) for name, ms in zip(FP8_BACKENDS, (8, 4, 6, 9), strict=True)
    ]
    report = Report("steps", "python x", {"gpu": "G"}, settings | {"model": "m"}, rows)
    page = markdown(report)
    assert report.stem == "engine_steps_fp8" and "; KV cache dtype fp8." in page
    assert "| 0.75 | 0.75 | 0.75 | 50% |" in page  # FLASHMLA over ours, which is no peer of itself
    assert "Attention, best peer / ours: geometric mean 0.750" in page
    assert "Attention, best peer / ours with fp8 queries: geometric mean 1.500" in page
    assert "mla-backend, fp8 queries: step, GPU, attn" in page and "rounded to e4m3" in page


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


def test_report_of_serving(tmp_path):
    from load import METRICS, STATISTICS
    from serve_report import Report
    from serve_results import markdown, write_results

    times = {f"{m}_{s}": 10.0 for m in METRICS for s in STATISTICS}
    settings = {"model": "m", "dtype": "bfloat16", "compile": False, "rounds": 3, "layers": 4}
    settings |= {"open_requests": 5, "together": True, "slo": "ttft:1 tpot:2", "as_is": False}
    settings |= {"heads": [128], "eager": False, "reduced": True}
    load = {"shape": "8/8", "goodput_s": 1.5, "failed": 0, "completed": 100, **times}
    rows = [
        {"backend": "CUSTOM", "start_s": 40.0, "same_tokens_as_first": 1.0},
        {"backend": "CUSTOM", "gpu_memory_gib": 9.5},
        {"backend": "CUSTOM", "loop": "closed", "concurrency": 4, "output_tok_s": 321.0, **load},
        {"backend": "CUSTOM", "loop": "open", "rate": 0.5, "output_tok_s": 99.0, **load},
        {"backend": "FLASHMLA", "error": "FLASHMLA did not start"},
        {"backend": "TRITON_MLA", "loop": "open", "rate": 0.5, "output_tok_s": 66.0, **load}
        | {"tpot_p50": 12.5},
    ]
    write_results(Report("serve", "python x", {"gpu": "G"}, settings, rows), tmp_path)
    page = (tmp_path / "serving.md").read_text()
    assert "Open loops: 5 requests, Poisson arrivals. Goodput" in page
    closed = [row for row in rows if row.get("loop") != "open"]
    assert "Open loops" not in markdown(Report("serve", "", {}, settings, closed))
    assert "Goodput" not in markdown(Report("serve", "", {}, settings | {"slo": ""}, rows))
    assert "4 dense layers of DeepSeek-V3's width, 128 heads" in page
    assert "loaded one at a time" in page and "A reduced list of loads" in page
    assert "| mla-backend | 100.0% | 40 |" in page
    assert "* GPU memory of mla-backend at the end: 9.5 GiB" in page
    assert "| 8/8 | 4 clients | mla-backend | 321 | 1.50 | 10.0 |" in page
    assert "| 8/8 | 0.5 a second | mla-backend | 99 | 1.50 |" in page
    assert "| 8/8 | 4 clients |  |  |" in page
    assert "| 8/8 | 0.5 a second |  | 1.50, 1.25 |" in page
    assert "best peer's: geometric mean 1.500, at least as many in 1 of 1 loads." in page
    assert "* backend FLASHMLA: FLASHMLA did not start" in page
    assert (tmp_path / "serving.png").exists()


SETTINGS = {
    "model": "m", "dtype": "bfloat16", "compile": False, "rounds": 3, "layers": 4,
    "open_requests": 5, "together": False, "slo": "ttft:1 tpot:2", "as_is": False, "heads": [128],
    "eager": False, "reduced": False,
}  # fmt: skip


def serve_row(backend, speed, clients=4, **more):
    from load import METRICS, STATISTICS

    times = {f"{m}_{s}": 10.0 for m in METRICS for s in STATISTICS}
    load = {"shape": "8/8", "loop": "closed", "concurrency": clients, "failed": 0}
    load["completed"] = 3 * clients
    return {"backend": backend, **load, **times, "output_tok_s": speed, **more}


def serve_page(*rows, folder=None):
    from serve_report import Report
    from serve_results import markdown, write_results

    report = Report("serve", "python x", {"gpu": "G"}, SETTINGS, list(rows))
    if folder:
        write_results(report, folder)
    return markdown(report)


@pytest.mark.parametrize(
    ("requests", "tokens", "expected"),
    [
        (2, 8, "10 10 - - 10 10 - - 10 10 - -"),
        (2, 11, "10 10 - - 10 10 - - 10 10 10 -"),  # 20 times between two tokens
        (19, 8, "10 10 - - 10 10 - - 10 10 10 10"),
        (20, 1, "10 10 10 - - - - - - - - -"),
        (99, 2, "10 10 10 - 10 10 10 - 10 10 10 -"),
        (100, 2, "10 10 10 10 10 10 10 10 10 10 10 10"),
    ],
)
def test_no_percentile_of_too_few(requests, tokens, expected):
    row = serve_row("CUSTOM", 100.0, completed=requests, shape=f"8/{tokens}")
    page = serve_page(row)
    cells = " | ".join(cell if cell == "-" else f"{cell}.0" for cell in expected.split())
    assert f"| 8/{tokens} | 4 clients | mla-backend | 100 |  | {cells} |" in page
    assert "-: of too few (p95 needs 20, p99 needs 100); " in page


def test_the_mean_is_of_the_best_peer_in_each_load():
    page = serve_page(
        serve_row("CUSTOM", 100.0),
        serve_row("FLASHMLA", 50.0),
        serve_row("TRITON_MLA", 125.0),
        serve_row("CUSTOM", 100.0, clients=8),
        serve_row("FLASHMLA", 80.0, clients=8),
        serve_row("TRITON_MLA", 40.0, clients=8),
    )
    assert "| 8/8 | 4 clients | 2.00, 1.00 | 0.80, 1.00 |" in page
    assert "geometric mean 1.000, at least as many in 1 of 2 loads." in page


def test_a_page_of_what_has_no_ratio(tmp_path):
    """No peer, answers of one token, peers without a token: the page is written all the same."""
    ours, fp8 = serve_row("CUSTOM", 100.0), serve_row("CUSTOM+fp8_query", 90.0)
    assert "Ours beside each peer" not in serve_page(ours, fp8)
    single = {f"{metric}_{at}": 0.0 for metric in ("itl", "tpot") for at in ("mean", "p50")}
    page = serve_page(ours | single, serve_row("FLASHMLA", 50.0, **single), folder=tmp_path)
    assert "| 8/8 | 4 clients | 2.00,  |" in page and (tmp_path / "serving.png").exists()
    page = serve_page(ours, serve_row("FLASHMLA", 0.0))
    assert "| 8/8 | 4 clients | , 1.00 |" in page and "geometric mean" not in page


@pytest.mark.parametrize("failed", [0, 3])
def test_a_load_with_failed_requests_is_not_measured(failed, monkeypatch):
    import serve_load
    from serve_cases import Load, Shape

    measured = serve_row("CUSTOM", 100.0, request_s=9.0)
    measured |= {"failed": failed}
    monkeypatch.setattr(serve_load, "run_load", lambda *_, **load: measured)
    args = MagicMock(rounds=5, repetitions=1)
    rows = []
    runner = serve_load.Runner(args, [Load(Shape(8, 8), 4)], Path(), math.inf, rows.append)
    runner.run([MagicMock(backend="CUSTOM")])
    (row,) = rows
    assert ("output_tok_s" in row) == (not failed) == bool(runner.fullest)
    if failed:
        page = serve_page(row, serve_row("FLASHMLA", 50.0))
        assert "loop closed concurrency 4): 3 of 20 requests failed" in page
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


@pytest.mark.parametrize(
    ("given", "taken"), [(" ", ""), (" tpot:50  ttft:2000\n", "tpot:50 ttft:2000")]
)
def test_objectives_are_words(given, taken):
    """Of spaces alone vLLM's load generator would say that it expects an argument, late."""
    from serve import parse_arguments

    assert parse_arguments(["--slo", given]).slo == taken


def test_only_the_first_server_sets_rates(monkeypatch):
    import serve_load
    from serve_cases import Load, Shape

    loads = [Load(Shape(8, 8), 4), Load(Shape(8, 8), share=0.5)]
    monkeypatch.setattr(
        serve_load, "run_load", lambda url, *_, **how: {"failed": url == "CUSTOM", "request_s": 9.0}
    )
    rows = []
    args = MagicMock(rounds=1, repetitions=1)
    runner = serve_load.Runner(args, loads, Path(), math.inf, rows.append)
    for name in ("CUSTOM", "FLASHMLA"):
        runner.run([MagicMock(backend=name, url=name)])
    assert ["not_run" in row for row in rows] == [False, True] * 2


def test_servers_that_run_together_share_the_gpu():
    import serve_load
    from serve import parse_arguments
    from serve_cases import Load, Shape

    loads = [Load(Shape(2000, 500), 4), Load(Shape(100, 100), 32), Load(Shape(8, 8), share=0.5)]
    backends = ["--backends", "CUSTOM", "FLASHMLA", "TRITON_MLA"]
    for together, share in (([], "0.900"), (["--together"], "0.300")):
        args = parse_arguments([*backends, *together, "--cache-gib", "2"])
        words = serve_load.server_options(args, loads, args.model)
        options = dict(itertools.pairwise(words))
        assert options["--gpu-memory-utilization"] == share
        assert options.get("--kv-cache-memory-bytes") == (str(2 << 30) if together else None)
        assert int(options["--max-model-len"]) >= 2500 and options["--max-num-seqs"] == "32"


def test_memory_of_a_gpu_is_that_of_the_servers_own_processes(monkeypatch):
    import serve_load

    said = [["7", "1024"], ["8", "512"], ["9", "4096"], ["8", "[N/A]"], ["No running processes"]]
    monkeypatch.setattr(serve_load, "nvidia_smi", lambda *_, of: said)
    assert serve_load.gpu_memory_gib({7, 8}) == 1.5
    assert serve_load.gpu_memory_gib({5}) is None


def test_of_repetitions_the_median_is_shown(tmp_path):
    ours = [serve_row("CUSTOM", speed, tpot_p50=speed) for speed in (300.0, 100.0, 200.0)]
    theirs = [serve_row("FLASHMLA", speed, tpot_p50=50.0) for speed in (100.0, 160.0)]
    page = serve_page(*ours, *theirs, folder=tmp_path)
    assert "| 4 clients | mla-backend | 200 (100 to 300) |" in page
    assert "| 4 clients | FLASHMLA | 100 (100 to 160) |" in page
    assert "| 8/8 | 4 clients | 2.00, 0.25 |" in page
    assert "in 1 of 1 loads" in page and "All loads were repeated: shown is" in page
    assert (tmp_path / "serving.png").exists()
    single = serve_page(ours[0], theirs[0])
    assert "| mla-backend | 300 |" in single and "repeated" not in single


@pytest.mark.parametrize("rows", [0, 1])
def test_results_stay_until_something_is_measured(rows, tmp_path, monkeypatch):
    import serve
    import serve_load

    def run(args, save):
        for _ in range(rows):
            save(serve_row("CUSTOM", 100.0))
        raise KeyboardInterrupt

    monkeypatch.setattr(serve_load, "run", run)
    monkeypatch.setattr(serve, "exit_on_signals", lambda: None)
    names = ["serving.json", "serving.md", "serving.png"]
    for name in names:
        (tmp_path / name).write_text("an earlier run")
    with pytest.raises(KeyboardInterrupt):
        serve.main(["--results", str(tmp_path)])
    assert [(tmp_path / name).read_bytes() for name in names] == [b"an earlier run"] * 3
    parts = {path.name: path for path in tmp_path.glob("*_partial.*")}
    assert sorted(parts) == [name.replace(".", "_partial.") for name in names] * rows
    for name in ("serving_partial.json", "serving_partial.md")[: 2 * rows]:
        assert "Not whole: the run was cut" in parts[name].read_text()


def test_a_run_that_is_killed_says_so_and_is_rendered_without_speeds_of_no_gate(
    tmp_path, monkeypatch
):
    import serve
    import serve_load

    at_the_end = []

    def run(args, save):
        save({"backend": "CUSTOM", "start_s": 1.0, "nats_from_first": 0.0})
        save({"backend": "FLASHMLA", "start_s": 1.0, "nats_from_first": None, "red": True})
        save(serve_row("CUSTOM", 1234.0))
        assert "1234" not in (tmp_path / "serving_partial.md").read_text()
        at_the_end.append((tmp_path / "serving_partial.json").read_text())

    monkeypatch.setattr(serve_load, "run", run)
    monkeypatch.setattr(serve, "exit_on_signals", lambda: None)
    assert serve.main(["--results", str(tmp_path)]) == 1
    assert "Not whole" not in (tmp_path / "serving.md").read_text()
    assert list(tmp_path.glob("*_partial.*")) == []
    killed = tmp_path / "killed.json"
    killed.write_text(at_the_end[0])
    assert serve.main(["--report", str(killed)]) == 0
    page = killed.with_suffix(".md").read_text()
    assert "Not whole: the run was cut off." in page
    assert "1234" not in page and "no other backend gives the same answers" in page


STEPS = "--mode steps"
SPARSE = "--mode steps --family v3.2 --kv-cache-dtype auto"


@pytest.mark.parametrize(
    ("words", "some"),
    [
        (f"{STEPS} --steps 200 --case-seconds 0.6 --layers 12 6 1", False),
        (f"{STEPS} --kv-cache-dtype fp8", False),
        (f"{STEPS} --heads 16 128", False),
        (f"{STEPS} --as-is --heads 16", False),
        (f"{STEPS} --heads 16", True),
        (f"{STEPS} --backends CUSTOM FLASHMLA", True),
        (f"{STEPS} --batches 1 8", True),
        (f"{STEPS} --contexts 4096", True),
        (f"{SPARSE} --heads 128 16 --layers 4", False),
        (f"{SPARSE} --heads 16", True),
        (f"{SPARSE} --contexts 8192", True),
        ("--heads 16 --together --layers 4 --rounds 1", False),
        ("--concurrency 1 8 16 32 96 128", False),
        ("--concurrency 1 8", True),
        ("--shapes 1024/1024", True),
        ("--rates", True),
        ("--rates 1 4", True),
        ("--reduced", True),
        ("--backends CUSTOM FLASHMLA FLASH_ATTN_MLA", True),
    ],
)
def test_less_than_all_does_not_replace_the_results_of_all(words, some, tmp_path, monkeypatch):
    import serve

    rows = [step_row("CUSTOM", 96, 8.0, 4.0)] if STEPS in words else [serve_row("CUSTOM", 9.0)]
    module = importlib.import_module("serve_steps" if STEPS in words else "serve_load")
    monkeypatch.setattr(module, "run", lambda args, save: [save(row) for row in rows])
    monkeypatch.setattr(serve, "exit_on_signals", lambda: None)
    assert serve.main([*words.split(), "--results", str(tmp_path)]) == 0
    partial = {path.stem.endswith("_partial") for path in tmp_path.iterdir()}
    assert partial == {some} and len(list(tmp_path.iterdir())) == 3
    for path in tmp_path.glob("*.md"):
        assert "Not whole" not in path.read_text()


def test_a_run_whose_time_is_over_says_so_and_replaces_nothing(tmp_path, monkeypatch):
    import serve
    import serve_load

    late = {"backend": "CUSTOM", "shape": "8/8", "loop": "open", "rate": 1.0}
    rows = [serve_row("CUSTOM", 100.0), late | {"not_run": "no time was left"}]
    monkeypatch.setattr(serve_load, "run", lambda args, save: [save(row) for row in rows])
    monkeypatch.setattr(serve, "exit_on_signals", lambda: None)
    (tmp_path / "serving.md").write_text("an earlier run")
    assert serve.main(["--results", str(tmp_path)]) == 0
    assert (tmp_path / "serving.md").read_text() == "an earlier run"
    page = (tmp_path / "serving_partial.md").read_text()
    assert "\nNot whole: no time was left for 1 rows.\n" in page
    assert "| 8/8 | 4 clients | mla-backend | 100 |" in page
    assert "* backend CUSTOM (shape 8/8 loop open rate 1.0): no time was left" in page


@pytest.mark.parametrize("text", [None, "{", "[1]", '{"rows": []}'])
def test_only_results_of_this_benchmark_are_rendered(text, tmp_path, capsys):
    from serve import main

    path = tmp_path / "result.json"
    if text:
        path.write_text(text)
    with pytest.raises(SystemExit):
        main(["--report", str(path)])
    assert "is no result of serve.py" in capsys.readouterr().err


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
