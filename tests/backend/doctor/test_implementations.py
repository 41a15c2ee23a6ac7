# SPDX-License-Identifier: Apache-2.0
"""Which implementation of each op the doctor says runs here, and why."""

from dataclasses import replace

from mla_kernels.dispatch import Choice

from mla_backend.doctor import implementations
from tests.backend.doctor.healthy import HEALTHY


def test_every_op_says_what_it_uses_and_why():
    shown = {r.name: r for r in implementations.results(HEALTHY)}
    assert {"mla_decode", "write_kv_cache"} <= set(shown)
    assert all(r.status == "ok" and r.found.startswith("torch: ") for r in shown.values())
    assert "triton" in shown["mla_decode"].found  # and why it was passed over


def test_an_implementation_that_cannot_run_here_fails():
    facts = replace(HEALTHY, environ={"MLA_BACKEND_IMPL": "cutlass"})
    shown = {r.name: r for r in implementations.results(facts)}
    assert shown["mla_decode"].status == "fail"
    assert "'cutlass'" in shown["mla_decode"].found and shown["mla_decode"].mend
    assert shown["write_kv_cache"].status == "ok"  # the variable is about decode


def test_a_fall_back_on_a_gpu_is_a_warning(monkeypatch):
    chosen = Choice("torch", "no kernel fits on cuda; triton: triton is not installed")
    monkeypatch.setattr("mla_kernels.dispatch.choose_impl", lambda *_, **__: chosen)
    result = implementations.choice("mla_decode", "auto", ("torch",), "cuda")
    assert (result.status, "not installed" in result.found) == ("warn", True)
