# SPDX-License-Identifier: Apache-2.0
"""The pages of benchmarks/serve.py: what of its rows they say."""

import pytest

from tests.benchmarks.measured_rows import serve_page, serve_row, step_row


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
            {"backend": "A", "shape": "8/8", "loop": "open", "rate": 2, **late},
            {"backend": "A", "error": "did not start"},
        ]
    ) == [
        "* backend B heads 128 layers 2 (batch 1 context 64; batch 9 context 64): lost",
        "* backend A (shape 8/8 loop open rate 2): no time was left",
        "* backend A: did not start",
    ]


def test_a_picture_of_other_rows_does_not_stay(tmp_path, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "matplotlib", None)
    (tmp_path / "serving.png").write_bytes(b"an earlier run's")
    serve_page(serve_row("CUSTOM", 100.0), folder=tmp_path)
    assert (tmp_path / "serving.md").exists() and not (tmp_path / "serving.png").exists()


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


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"kv_cache_dtype": "fp8"}, "bfloat16, KV cache dtype fp8, no torch.compile"),
        ({"family": "v3.2"}, "4 layers of DeepSeek-V3.2 without experts, each with its indexer"),
        ({"heads": [32]}, "32 heads and 1 / 4 of the MLP, as on one of 4 tensor-parallel"),
        ({"server_options": ["--enable-prefix-caching", "-x"]}, "graphs of decode steps, prefix "
         "caching; vLLM's server with the same options for every backend, among them "
         "--enable-prefix-caching -x, loaded by"),
        ({"model": "deepseek-v2-lite"}, "4 dense layers of the width of configs/models/deepseek-v"),
        ({"reduced": True, "concurrency": [8]}, "arrivals, of which up to 128 run at once, as of"),
        ({"server_options": ["--max-num-seqs=4"], "concurrency": [8]}, "Poisson arrivals. "),
        ({"concurrency": [1, 8]}, "5 requests, Poisson arrivals, of which up to 8 run at once, as"),
    ],
)  # fmt: skip
def test_a_page_says_what_was_served(changes, said):
    from serve_report import Report
    from serve_results import markdown

    settings = {"model": "deepseek-v3-5-layers", "dtype": "bfloat16", "compile": False}
    settings |= {"rounds": 3, "layers": 4}
    settings |= {"open_requests": 5, "together": False, "slo": "", "as_is": False}
    settings |= {"heads": [128], "eager": False, "reduced": False}
    rows = [serve_row("CUSTOM", 100.0) | {"loop": "open", "rate": 0.5}]
    assert said in markdown(Report("serve", "", {}, settings | changes, rows))


@pytest.mark.parametrize("heads, said", [
    ([128, 16], "128 heads, or 16 with an eighth of the MLP as on one of 8 tensor-parallel GPUs"),
    ([32], "says, 32 heads; fewer than 128 with their share of the MLP, as on a tensor-parallel"),
    ([128], "as many as a heading says, 128 heads. bfloat16"),
])  # fmt: skip
def test_a_page_of_steps_names_its_heads(heads, said):
    from serve_report import Report
    from serve_results import markdown

    settings = {"model": "deepseek-v3-5-layers", "dtype": "bfloat16", "compile": False}
    settings |= {"as_is": False, "eager": False, "heads": heads}
    assert said in markdown(Report("steps", "", {}, settings, []))
    other = settings | {"model": "deepseek-v2-lite", "as_is": True, "family": "v3.2"}
    other |= {"kv_cache_dtype": "fp8_ds_mla"}
    assert "deepseek-v2-lite; KV cache dtype fp8_ds_mla." in markdown(
        Report("steps", "", {}, other, [])
    )
    other = markdown(Report("steps", "", {}, other | {"as_is": False, "family": "v3"}, []))
    assert "dense layers of the width of configs/models/deepseek-v2-lite, as many" in other


def test_one_server_alone_has_none_to_compare():
    from serve_pages import _gate_lines

    first = {"backend": "CUSTOM", "start_s": 40.0, "nats_from_first": 0.0}
    assert _gate_lines([first])[-1] == "| mla-backend | none to compare | 40 |"
    second = {"backend": "FLASHMLA", "start_s": 40.0, "nats_from_first": 0.031}
    assert _gate_lines([first, second])[-2] == "| mla-backend | 0.000 | 40 |"


def test_report_of_serving(tmp_path):
    from load import METRICS, STATISTICS
    from serve_report import Report
    from serve_results import markdown, write_results

    times = {f"{m}_{s}": 10.0 for m in METRICS for s in STATISTICS}
    settings = {"model": "deepseek-v3-5-layers", "dtype": "bfloat16", "compile": False}
    settings |= {"rounds": 3, "layers": 4}
    settings |= {"open_requests": 5, "together": True, "slo": "ttft:1 tpot:2", "as_is": False}
    settings |= {"heads": [128], "eager": False, "reduced": True}
    load = {"shape": "8/8", "goodput_s": 1.5, "failed": 0, "completed": 100, **times}
    rows = [
        {"backend": "CUSTOM", "start_s": 40.0, "same_tokens_as_first": 1.0},
        {"backend": "CUSTOM", "compiled_in_loads": {"b": 3, "a": 1}},
        {"backend": "FLASHMLA", "compiled_in_loads": {}},
        {"backend": "CUSTOM", "gpu_memory_gib": 9.5},
        {"backend": "CUSTOM", "loop": "closed", "concurrency": 4, "output_tok_s": 321.0, **load},
        {"backend": "CUSTOM", "loop": "open", "rate": 0.5, "output_tok_s": 99.0, **load},
        {"backend": "FLASHMLA", "error": "FLASHMLA did not start"},
        {"backend": "TRITON_MLA", "loop": "open", "rate": 0.5, "output_tok_s": 66.0, **load}
        | {"tpot_p50": 12.5},
    ]
    write_results(Report("serve", "python x", {"gpu": "G"}, settings, rows), tmp_path)
    page = (tmp_path / "serving.md").read_text()
    room = ", of which up to 128 run at once, as of the closed loops"
    assert f"Open loops: 5 requests, Poisson arrivals{room}. Goodput" in page
    closed = [row for row in rows if row.get("loop") != "open"]
    assert "Open loops" not in markdown(Report("serve", "", {}, settings, closed))
    assert "Goodput" not in markdown(Report("serve", "", {}, settings | {"slo": ""}, rows))
    assert "4 dense layers of DeepSeek-V3's width, 128 heads" in page
    assert (
        "CUDA graphs of decode steps, no prefix caching; vLLM's server with the same options for"
        in page
    )
    assert "loaded one at a time" in page and "A reduced list of loads" in page
    assert "| mla-backend | 100.0% | 40 |" in page
    assert "* GPU memory of mla-backend at the end: 9.5 GiB" in page
    assert "* Kernels that mla-backend made ready in its loads: a (1), b (3)\n" in page
    assert "* Kernels that FLASHMLA made ready in its loads: none\n" in page
    assert "| 8/8 | 4 clients | mla-backend | 321 | 1.50 | 10.0 |" in page
    assert "| 8/8 | 0.5 a second | mla-backend | 99 | 1.50 |" in page
    assert "| 8/8 | 4 clients |  |  |" in page
    assert "| 8/8 | 0.5 a second |  | 1.50, 1.25 |" in page
    assert "best peer's: geometric mean 1.500, at least as many in 1 of 1 loads." in page
    assert "* backend FLASHMLA: FLASHMLA did not start" in page
    assert (tmp_path / "serving.png").exists()


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


def test_a_repetition_without_time_is_nothing_that_lacks():
    """Of two loads one was repeated: the other one is whole all the same."""
    from ending import NO_TIME, shortage

    once, twice = serve_row("CUSTOM", 100.0), [serve_row("CUSTOM", 7.0, concurrency=8)] * 2
    case = {k: once[k] for k in ("backend", "shape", "loop", "concurrency")}
    rows = [once, *twice, case | {"not_run": NO_TIME}]
    page = serve_page(*rows)
    assert "Those loads with brackets were repeated: shown is" in page
    assert "Not measured" not in page and shortage(rows) == ""
    other = case | {"backend": "FLASHMLA", "not_run": NO_TIME}
    page = serve_page(*rows, other)
    assert "* backend FLASHMLA (shape 8/8 loop closed concurrency 4): no time" in page
    assert shortage([*rows, other]) == "Not whole: no time was left for 1 rows."
