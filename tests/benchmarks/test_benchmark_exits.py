# SPDX-License-Identifier: Apache-2.0
"""The exit codes of benchmarks that run on a GPU: what failed is not taken for a result."""

import importlib
import sys
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch

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


def test_a_layer_on_another_gpu_says_what_cannot_run(tmp_path, monkeypatch):
    """All of the benchmark on small layers and a CPU, torch in the place of the portable one."""
    import mla_layer
    import torch
    from mla_kernels.layer import MlaLayerConfig

    small = MlaLayerConfig(dim=64, num_heads=2, q_lora_rank=32)
    refused, timer = "impl='hopper' of mla_decode cannot run here: cpu", MagicMock()
    timer.return_value.medians.side_effect = lambda runs: dict.fromkeys(runs, 9.0)

    def choose(impl, device):
        if impl == "hopper":
            raise ValueError(refused)

    ours = mla_layer.ours
    for name, stand_in in {
        "DEVICE": "cpu",
        "need_gpu": MagicMock(),
        "describe_gpu": lambda: {"gpu": "G", "commit": "c", "read_gbps": 1, "bf16_gemm_tflops": 1},
        "MlaLayerConfig": lambda: small,
        "Timer": timer,
        "eager_us": lambda run: 9.0,
        "choose_decode_impl": choose,
        "ours": lambda case, impl: ours(case, {"triton": "torch"}.get(impl, impl)),
    }.items():
        monkeypatch.setattr(mla_layer, name, stand_in)
    monkeypatch.setattr(torch, "compile", lambda step, **_: step)
    words = ["mla_layer.py", "--batch", "2", "--prefill", "0", "70", "--results", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", words)
    assert mla_layer.main() == 0
    page = (tmp_path / "mla_layer_partial.md").read_text()
    assert page.count(" | not run | 9.0 | 9.0 | 9.0 |") == 2
    assert page.endswith(f"\nNot run:\n\n* mla_kernels/hopper: {refused}\n")


@pytest.mark.parametrize("words", ["--batch 0", "--prefill -1", "--impl hoper"])
def test_a_layer_of_bad_arguments_is_refused(words, tmp_path, monkeypatch):
    import mla_layer

    monkeypatch.setattr(sys, "argv", ["mla_layer.py", *words.split(), "--results", str(tmp_path)])
    with pytest.raises(SystemExit) as left:
        mla_layer.main()
    assert left.value.code == 2


def test_the_hopper_kernels_stages_are_refused_on_another_gpu(tmp_path, monkeypatch):
    import hopper_stages

    monkeypatch.setattr(hopper_stages, "need_gpu", MagicMock())
    monkeypatch.setattr(hopper_stages.torch.cuda, "get_device_capability", lambda: (8, 0))
    monkeypatch.setattr(hopper_stages, "stage_clocks", MagicMock(side_effect=RuntimeError("PTX")))
    monkeypatch.setattr(sys, "argv", ["hopper_stages.py", "--results", str(tmp_path)])
    with pytest.raises(SystemExit, match=r"for sm_90; got \(8, 0\)"):
        hopper_stages.main()


def test_sparse_attention_on_another_gpu_leaves_out_what_cannot_run(monkeypatch):
    """Here none of our kernels can: nothing of them has failed."""
    import re

    import sparse
    import sparse_cases

    monkeypatch.setattr(sparse_cases, "DEVICE", "cpu")
    batch = sparse_cases.make_batch(sparse_cases.Shape(1, 4, context=2048, cache="bf16"))
    rows, _ = sparse.check(batch, re.compile("mla_kernels/hopper"))
    assert rows == []


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


def test_a_layer_that_is_wrong_is_not_timed(monkeypatch):
    """NaN among it: it is above no bar."""
    import mla_layer

    want = torch.ones(1, 4)

    def gives(x):
        return lambda *_: lambda: x * torch.ones(2, 4)

    monkeypatch.setattr(mla_layer, "golden", lambda *_: want)
    monkeypatch.setattr(mla_layer, "floor_us", lambda *_: (1.0, "memory"))
    monkeypatch.setattr(mla_layer, "refusal", lambda impl: "")
    monkeypatch.setattr(mla_layer, "Timer", Timer)
    monkeypatch.setattr(mla_layer, "eager_us", lambda run: 9.0)
    errors = {"hopper": 1.005, "triton": float("nan")}
    monkeypatch.setattr(mla_layer, "ours", lambda case, impl: gives(errors[impl])())
    monkeypatch.setattr(mla_layer, "absorbed_torch", gives(1.02))
    monkeypatch.setattr(mla_layer, "naive_torch", gives(1.01))
    naive, rows = (lambda *_: (1.01 * want,)), torch.zeros(1, 4)
    case = SimpleNamespace(batch=1, name="b1_p8", naive=naive, x=rows, past=rows)
    rows = mla_layer.run_case(case, list(errors), {})
    assert [row["us"] for row in rows] == [50.0, None, None, 9.0]
    assert [row["note"][:6] for row in rows] == ["", "wrong:", "wrong:", ""]


class Timer:
    def medians(self, runs):
        return dict.fromkeys(runs, 50.0)


def test_the_floor_of_a_layer_is_its_weights_and_its_cache():
    import mla_layer

    matrices = ("down", "q_up", "k_up", "v_up", "out")
    weights = SimpleNamespace(**{name: torch.empty(3, 100) for name in matrices})
    cache = SimpleNamespace(head_dim=576)
    config = SimpleNamespace(cache=cache, kv_lora_rank=512, num_heads=4)
    naive = SimpleNamespace(config=config)
    case = SimpleNamespace(weights=weights, naive=naive, batch=2, prefill=9)
    moved = 2 * (1500 + 2 * 10 * 576)
    flop = 2 * 2 * (1500 + 4 * 10 * (576 + 512))
    slow_memory, slow_gemm = (
        {"read_gbps": gbps, "bf16_gemm_tflops": tflops} for gbps, tflops in ((1, 1), (1000, 1e-3))
    )
    assert mla_layer.floor_us(case, slow_memory) == (pytest.approx(moved / 1e3), "memory")
    assert mla_layer.floor_us(case, slow_gemm) == (pytest.approx(flop / 1e3), "compute")
