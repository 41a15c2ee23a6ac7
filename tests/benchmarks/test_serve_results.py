# SPDX-License-Identifier: Apache-2.0
"""Which results a run of benchmarks/serve.py writes, replaces and renders again."""

import importlib
from pathlib import Path

import pytest

from tests.benchmarks.measured_rows import serve_row, step_row


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


LITE = Path(__file__).parents[2] / "configs" / "models" / "deepseek-v2-lite"
STEPS = "--mode steps"
SPARSE = "--mode steps --family v3.2 --kv-cache-dtype auto"


@pytest.mark.parametrize(
    ("words", "some"),
    [
        (f"{STEPS} --steps 200 --case-seconds 0.6 --layers 12 6 1", False),
        (f"{STEPS} --kv-cache-dtype fp8", False),
        (f"{STEPS} --heads 16 128", False),
        (f"{STEPS} --as-is", False),
        (f"{STEPS} --cache-gib 30 --case-seconds 1", False),
        (f"{STEPS} --heads 16", True),
        (f"{STEPS} --eager", True),
        (f"{STEPS} --dtype float16", True),
        (f"{STEPS} --model {LITE}", True),
        (f"{STEPS} --model {LITE} --as-is", False),
        (f"{STEPS} --model {LITE} --as-is --eager", True),
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
        (f"--model {LITE.with_name('deepseek-v3-5-layers')}", False),
        (f"--model {LITE} --as-is", False),
        (f"--model {LITE}", True),
        ("--dtype float16", True),
        ("--eager", True),
        ("--compile", True),
        ("--server-options=--enable-prefix-caching", True),
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
