# SPDX-License-Identifier: Apache-2.0
"""docs/support.md is what the code says now, and what it promises for a GPU a GPU kernel takes."""

import inspect
import os
from pathlib import Path

import pytest
import torch

PAGE = Path(__file__).parents[2] / "docs" / "support.md"


def features():
    """The first two columns of answers: {what: (on a CPU, on a GPU)}."""
    from mla_backend.support_matrix import engine

    rows = [line.strip("| ").split(" | ") for line in engine.section().splitlines() if "|" in line]
    return {row[0]: tuple(row[1:]) for row in rows}


def test_page_is_current():
    from vllm.v1.attention.backend import AttentionBackend

    if "use_rswa" not in inspect.signature(AttentionBackend.validate_configuration).parameters:
        pytest.skip("an older vLLM asks for less than the page lists")
    from mla_backend.support_matrix import markdown

    assert PAGE.read_text() == markdown(), (
        "run: python -m mla_backend.support_matrix > docs/support.md"
    )


def test_settings_of_who_prints_the_page_are_not_in_it(monkeypatch):
    from mla_backend.support_matrix import engine

    plain = engine.section()
    settings = {"IMPL": "triton", "RESCALE": "amla", "FP8_QUERY": "1", "FP8_INDEXER": "1"}
    for name, value in settings.items():
        monkeypatch.setenv(f"MLA_BACKEND_{name}", value)
    assert engine.section() == plain
    assert os.environ["MLA_BACKEND_IMPL"] == "triton"  # put back


def test_no_two_answers_are_the_same_by_accident():
    answers = features()
    assert answers["model dtype bfloat16"] == ("yes", "yes")
    assert answers["model dtype float32"] == ("yes", "no")
    assert answers["sliding window"] == ("no", "no")


def test_context_parallelism_is_for_gpus():
    from vllm.v1.attention.backend import AttentionBackend

    if "use_dcp" not in inspect.signature(AttentionBackend.validate_configuration).parameters:
        pytest.skip("an older vLLM does not ask")
    answers = features()
    assert answers["decode context parallelism"] == ("no", "yes")
    assert answers["sparse attention, decode context parallelism"] == ("no", "yes")


def test_the_gpu_takes_only_what_its_kernels_take():
    from mla_kernels.decode.triton.support import check_supported
    from mla_kernels.layouts import MlaDims

    from mla_backend.attention import support

    dims = {576: MlaDims(512, 64), 320: MlaDims(256, 64)}
    for size in support.HEAD_SIZES:
        for name in support.GPU_DTYPES:
            check_supported(dims[size], getattr(torch, name))


def test_a_gpu_refuses_what_only_torch_computes(monkeypatch):
    from vllm.platforms.interface import DeviceCapability

    from mla_backend.attention import layer_reasons

    config = {"device_capability": DeviceCapability(9, 0), "kv_cache_dtype": "auto"}
    config |= {"dtype": torch.float32, "head_size": 576, "use_sparse": True}
    (fp32,) = layer_reasons.combination_reasons(config)
    assert "model dtype float32 on a GPU" in fp32 and "Mend: --dtype bfloat16" in fp32
    monkeypatch.setenv("MLA_BACKEND_IMPL", "torch")
    assert layer_reasons.combination_reasons(config) == []
    monkeypatch.delenv("MLA_BACKEND_IMPL")
    assert layer_reasons.combination_reasons({**config, "device_capability": None}) == []
