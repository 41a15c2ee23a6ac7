# SPDX-License-Identifier: Apache-2.0
"""The exit codes of benchmarks that run on a GPU: what failed is not taken for a result."""

import importlib
import sys
from pathlib import Path
from unittest.mock import MagicMock

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def benchmarks_importable(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))


TIMED = {"heads": 16, "layers": 2, "batch": 1, "context": 64, "backend": "CUSTOM", "step_ms": 1.0}
GREEN = {"backend": "CUSTOM", "nats_from_first": 0.0}
LATE = {"backend": "CUSTOM", "not_run": "no time was left"}
SPEED = {"backend": "CUSTOM", "shape": "8/8", "output_tok_s": 9.0}
RED = {"backend": "FLASHMLA", "nats_from_first": None, "red": True}


@pytest.mark.parametrize("mode", ["steps", "serve"])
@pytest.mark.parametrize(
    ("rows", "code"),
    [
        ([GREEN, TIMED], 0),
        ([GREEN, TIMED, LATE], 0),
        ([GREEN, TIMED, RED], 1),
        ([GREEN, TIMED, LATE, {"backend": "FLASHMLA", "error": "3 of 20 requests failed"}], 1),
        ([SPEED, {"backend": "CUSTOM", "not_run": "no closed loop of that shape was run"}], 1),
    ],
)
def test_serve(rows, code, mode, tmp_path, monkeypatch):
    import serve
    import serve_results

    run = importlib.import_module({"steps": "serve_steps", "serve": "serve_load"}[mode])
    monkeypatch.setattr(run, "run", lambda args, save: [save(row) for row in rows])
    monkeypatch.setattr(serve_results, "markdown", lambda report: "")
    monkeypatch.setattr(serve_results, "write_results", lambda *_: None)
    monkeypatch.setattr(serve, "exit_on_signals", lambda: None)
    assert serve.main(["--mode", mode, "--results", str(tmp_path)]) == code


def layer_row(impl, note="", us=None):
    row = {"case": "b128_p512", "floor_us": 1.0, "roof": "memory", "rel_err": None}
    return row | {"impl": impl, "note": note, "us": us}


@pytest.mark.parametrize(
    ("impl", "note", "code"),
    [
        ("torch/naive", "out of memory", 0),
        ("torch/naive", "wrong: error above 0.01", 1),
        ("mla_kernels/hopper", "out of memory", 1),
        ("torch.compile/absorbed", "out of memory", 1),
        ("mla_kernels/hopper", "wrong: error above 0.01", 1),
    ],
)
def test_only_the_naive_layer_may_run_out_of_memory(impl, note, code, tmp_path, monkeypatch):
    import mla_layer

    rows = [layer_row("mla_kernels/triton", us=9.0), layer_row(impl, note)]
    for name in ("need_gpu", "make_naive", "make_case"):
        monkeypatch.setattr(mla_layer, name, MagicMock())
    monkeypatch.setattr(mla_layer, "describe_gpu", lambda: {"gpu": "G", "commit": "c"})
    monkeypatch.setattr(mla_layer, "run_case", lambda *_: rows)
    words = ["mla_layer.py", "--prefill", "512", "--results", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", words)
    assert mla_layer.main() == code
