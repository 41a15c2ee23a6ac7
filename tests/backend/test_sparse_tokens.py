# SPDX-License-Identifier: Apache-2.0
"""Tokens and logprobs of DeepSeek-V3.2 engines against transformers' own model, in fp32."""

import pytest
from mla_serving.demo_model import make_demo_model

pytestmark = pytest.mark.engine

LAYERS = 4


@pytest.fixture(scope="module")
def dense(run_engine, scenarios, tmp_path_factory):
    """(checkpoint, result): index_topk beyond every context, so every token is read."""
    folder = tmp_path_factory.mktemp("v32-dense") / "model"
    checkpoint = make_demo_model("v3.2", folder, overrides={"index_topk": 2048})
    requests = {name: scenarios[name] for name in ("plain", "prefix")}
    return checkpoint, run_engine(requests, model=checkpoint, env={"MLA_BACKEND_CHECK": "1"})


@pytest.mark.parametrize("scenario", ["plain", "prefix"])
def test_all_tokens_chosen(dense, oracle, scenario):
    checkpoint, result = dense
    agreed, differences = oracle(checkpoint, result["scenarios"][scenario]["outputs"])
    assert agreed == len(differences) >= 128
    assert differences.max() < 1e-4
