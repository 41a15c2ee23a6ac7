# SPDX-License-Identifier: Apache-2.0
"""GPUs by name: their memory, and the rates that are read from committed results."""

import json
import re

import pytest
from mla_serving.plan import rates

from tests.serving.plan.plan_models import ROOT


@pytest.mark.parametrize("gpu", ["h200", "h100"])
def test_rates_are_those_of_the_committed_results(gpu):
    """As the plan names those files as its source, to the digit."""
    folder = ROOT / "benchmarks" / "results" / gpu
    shipped = json.loads((ROOT / "serving/mla_serving/plan/rates.json").read_text())
    assert shipped[gpu] == rates.read(folder)[gpu], (
        "run python -m mla_serving.plan.rates benchmarks/results/{h200,h100} > rates.json and put "
        "that beside rates.py"
    )
    found = rates.load(gpu)
    assert (ROOT / found.source(sparse=False)).exists()
    names = re.fullmatch(r"(.*/)\{(.*)\}(\.json)", found.source(sparse=True)).groups()
    assert all((ROOT / f"{names[0]}{name}{names[2]}").exists() for name in names[1].split(","))
    assert set(names[1].split(",")) == set(found.cases)


def test_a_case_has_a_rate_of_each_of_our_kernels():
    fp8, plain = "b4_h16_q1_k4096_fp8", "b4_h16_q1_k4096"
    timed = [(fp8, "hopper", 9), (fp8, "triton", 7), (fp8, "flashmla", 1), (plain, "triton", 8)]
    rows = [
        {"case": case, "impl": f"mla_kernels/{impl}/pow2", "us": us} for case, impl, us in timed
    ]
    rows.append({"case": plain, "impl": "mla_kernels/hopper/pow2"})  # refused: without a time
    machine = {"gpu": "NVIDIA H200", "read_gbps": 4000, "bf16_gemm_tflops": 500}
    for order in (rows, rows[::-1]):
        found = rates.table({rates.DENSE: {"machine": machine, "rows": order}})["h200"]["cases"]
        times = {(case["name"], case["kernel"]): case["us"] for case in found[rates.DENSE]}
        assert times == {(fp8, "hopper"): 9, (fp8, "triton"): 7, (plain, "triton"): 8}


def test_the_rate_of_an_indexer_is_that_in_fp8_where_it_was_measured():
    """As vLLM has it on Hopper, also if it is slower; of its two steps and of peers it is not."""
    machine = {"gpu": "NVIDIA H200", "read_gbps": 4000, "bf16_gemm_tflops": 500}
    timed = [
        ("b4x4096", "mla_kernels/fused", 9), ("b4x4096", "mla_kernels/fused/fp8_products", 7),
        ("b4x4096", "mla_kernels/two steps/fp8_products", 5), ("b4x4096", "deepgemm", 4),
        ("b4x4096_q2", "mla_kernels/fused/fp8_products", 3), ("b8x4096", "mla_kernels/fused", 8),
        ("b9x4096", "mla_kernels/fused", 6), ("b9x4096", "mla_kernels/fused/fp8_products", 7),
    ]  # fmt: skip
    rows = [{"case": case, "impl": impl, "us": us} for case, impl, us in timed]
    for order in (rows, rows[::-1]):
        reports = {rates.DENSE: {"machine": machine, "rows": []}, rates.INDEXER: {"rows": order}}
        found = rates.table(reports)["h200"]["cases"][rates.INDEXER]
        times = {case["name"]: case["us"] for case in found}
        assert times == {"b4x4096": 7, "b4x4096_q2": 3, "b8x4096": 8, "b9x4096": 7}
        assert {case["name"] for case in found if "new_tokens" in case} == {"b4x4096_q2"}


def test_memory_is_what_nvidia_smi_says():
    assert rates.MEMORY_MIB == {
        "a100-40": 40_960, "a100": 81_920, "h20": 97_871, "h100": 81_559, "h200": 143_771,
        "b200": 183_359, "l40s": 46_068, "rtx4090": 24_564,
    }  # fmt: skip


def test_gpus_are_known_by_the_names_of_their_drivers():
    names = ("NVIDIA H100 80GB HBM3", "NVIDIA H200", "NVIDIA H20", "NVIDIA GeForce RTX 4090")
    assert [rates.known_name(name) for name in names] == ["h100", "h200", "h20", "rtx4090"]
    with pytest.raises(ValueError, match=r"Expected a GPU of .*h200.*, got 'Tesla T4'"):
        rates.known_name("Tesla T4")


def test_gpus_of_compute_capabilities_are_known():
    assert {*rates.SM_80, *rates.SM_90} <= set(rates.MEMORY_MIB)
    assert rates.SM_10X == ("b200",) and set(rates.SM_10X) <= set(rates.MEMORY_MIB)
