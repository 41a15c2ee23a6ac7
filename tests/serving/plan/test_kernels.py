# SPDX-License-Identifier: Apache-2.0
"""Times are those of the kernel that an engine takes at start-up, not of the faster one."""

import json
import subprocess
import sys

import pytest
import torch
from mla_kernels.layouts import MlaDims
from mla_serving.plan import cost, rates
from mla_serving.plan.config import from_config
from mla_serving.plan.kernels import chosen
from mla_serving.plan.layout import GIB, Layout

from tests.serving.plan.plan_models import MODELS, ROOT, V3, V32, config, question

CACHES = {"16 bit": "auto", "fp8": "fp8", "fp8_ds_mla": "fp8_ds_mla"}


def measured(gpu, page, case, kernel):
    """Microseconds of `kernel` as the page has them."""
    rows = json.loads((ROOT / f"benchmarks/results/{gpu}/{page}.json").read_text())["rows"]
    impl = {"dense_decode": f"mla_kernels/{kernel}/pow2", "sparse": f"mla_kernels/{kernel}"}[page]
    return next(row["us"] for row in rows if (row["case"], row["impl"]) == (case, impl))


def planned(gpu, folder, heads, batch, context, cache="auto", by=None, **changes):
    """The attention of one layer with so many heads on a GPU."""
    shape = {"num_hidden_layers": 1, "first_k_dense_replace": 1, "num_attention_heads": heads}
    model = from_config(config(folder, **shape, **changes), "m")
    load = {"batch": batch, "context": context, "kv_cache_dtype": cache, "memory": 10_000 * GIB}
    by = by or rates.load(gpu)
    plan = cost.make(question(model, Layout(tp=1), gpu=gpu, rates=by, **load))
    return plan.attention.kernels["attention"]


@pytest.mark.parametrize(
    "gpu, page, case, cache",
    [
        ("h200", "dense_decode", "b96_h128_q1_k4096", "auto"),
        ("h100", "dense_decode", "b96_h128_q1_k4096", "auto"),
        ("h200", "dense_decode", "b96_h128_q1_k16384_fp8", "fp8"),
        ("h200", "dense_decode", "b128_h16_q1_k4096_fp8_ds_mla", "fp8_ds_mla"),
        ("h200", "sparse", "b128_h128_q1_32k_bf16", "auto"),
        ("h200", "sparse", "b96_h128_q1_32k_fp8_ds_mla", "fp8_ds_mla"),
    ],
)
def test_a_model_in_float16_has_the_portable_kernel(gpu, page, case, cache):
    """Those of Hopper take bfloat16 alone."""
    batch, heads = (int(part[1:]) for part in case.split("_")[:2])
    context = int(case.split("_")[3].removeprefix("k")) if page == "dense_decode" else 32768
    folder = V32 if page == "sparse" else V3
    for dtype, kernel in (("bfloat16", "hopper"), ("float16", "triton")):
        found = planned(gpu, folder, heads, batch, context, cache, torch_dtype=dtype)
        assert found.us == pytest.approx(measured(gpu, page, case, kernel)), dtype
        assert found.case == case


@pytest.mark.parametrize(
    "gpu, page, case, cache, kernel",
    [
        # One request alone, or few heads on an H100: the other kernel is faster there.
        ("h200", "sparse", "b1_h32_q1_32k_fp8_ds_mla", "fp8_ds_mla", "hopper"),
        ("h200", "sparse", "b1_h16_q1_32k_bf16", "auto", "hopper"),
        ("h100", "dense_decode", "b128_h16_q1_k4096_fp8", "fp8", "hopper"),
        ("h200", "sparse", "b128_h16_q1_32k_fp8_ds_mla", "fp8_ds_mla", "triton"),
        ("h200", "sparse", "b128_h16_q1_32k_fp8", "fp8", "triton"),
    ],
)
def test_a_time_is_of_the_kernel_that_an_engine_takes(gpu, page, case, cache, kernel):
    batch, heads = (int(part[1:]) for part in case.split("_")[:2])
    folder, context = (V32, 32768) if page == "sparse" else (V3, 4096)
    found = planned(gpu, folder, heads, batch, context, cache)
    assert found.us == pytest.approx(measured(gpu, page, case, kernel))
    assert found.case == case


def test_there_is_no_time_where_only_the_other_kernel_was_measured():
    of = rates.load("h200")
    hopper = tuple(case for case in of.cases[rates.DENSE] if case.kernel == "hopper")
    few = rates.Rates("h200", of.read_gbps, of.gemm_tflops, {rates.DENSE: hopper})
    assert planned("h200", V3, 128, 96, 4096, by=few).us > 0
    found = planned("h200", V3, 128, 96, 4096, by=few, torch_dtype="float16")
    said = "no float16 cache was measured with the triton kernel"
    assert (found.us, found.unmeasured) == (None, said)


@pytest.mark.parametrize("folder", [V3, V32])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("gpu, sm", [("h200", (9, 0)), ("a100", (8, 0)), ("b200", (10, 0))])
def test_the_kernel_is_the_one_that_the_backend_chooses(monkeypatch, folder, dtype, gpu, sm):
    """Which looks at the GPU."""
    from mla_kernels import dispatch
    from mla_kernels.arch import get_arch

    from mla_backend.attention.kernel import DecodeKernel, cache_dtype
    from mla_backend.attention.sparse.kernel import SparseKernel

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: sm)
    monkeypatch.setattr(dispatch, "device_arch", lambda device: get_arch(10 * sm[0] + sm[1]))
    device, of = torch.device("cuda:0"), getattr(torch, dtype)
    model = from_config(config(folder, torch_dtype=dtype), "m")
    for cache, name in CACHES.items():
        for heads in (1, 8, 16, 17, 32, 64, 128):
            if folder == V32:
                rows = cache_dtype(name, of)
                engine = SparseKernel.choose(device, MlaDims(), of, rows, heads).attention
            else:
                engine = DecodeKernel.choose(MlaDims(), of, name, device).impl
            assert chosen(model, heads, cache, gpu) == engine, (cache, heads)


def test_no_triton_is_needed():
    """Where a plan is made there need not be a GPU, nor what its kernels are compiled with."""
    run = (
        "import sys; sys.modules['triton'] = None; from mla_serving.cli import main; "
        "sys.exit(main(['plan', '--gpus', '8', '--model', sys.argv[1]]))"
    )
    for folder in (V3, V32):
        done = subprocess.run(
            [sys.executable, "-c", run, str(MODELS / folder)], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        assert ", as b" in done.stdout
