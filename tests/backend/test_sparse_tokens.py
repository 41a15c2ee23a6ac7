# SPDX-License-Identifier: Apache-2.0
"""Tokens and logprobs of DeepSeek-V3.2 engines against transformers' own model, in fp32."""

import pytest
import torch
from follow import following
from mla_serving.demo_model import make_demo_model

pytestmark = pytest.mark.engine

LAYERS = 3


@pytest.fixture(scope="module", params=["0", "auto"], ids=["absorbed", "expanded"])
def dense(request, run_engine, scenarios, tmp_path_factory):
    """(checkpoint, result): index_topk beyond every context, so every token is read; where that
    pays, prompts attend in expanded form, if they may."""
    folder = tmp_path_factory.mktemp("v32-dense") / "model"
    checkpoint = make_demo_model(
        "v3.2", folder, overrides={"index_topk": 2048, "num_hidden_layers": LAYERS}
    )
    requests = {name: scenarios[name] for name in ("plain", "prefix")}
    env = {"MLA_BACKEND_CHECK": "1", "MLA_BACKEND_EXPAND_PROMPTS": request.param}
    expands = request.param == "auto"
    return checkpoint, run_engine(requests, model=checkpoint, env=env), expands


@pytest.fixture(scope="module")
def sparse(run_engine, scenarios, tmp_path_factory):
    """(checkpoint, result): 32 tokens are read of up to 500. A draft layer (MTP), sparse as well,
    proposes 2 tokens, so that rows of 3 are checked."""
    folder = tmp_path_factory.mktemp("v32-sparse") / "model"
    overrides = {"index_topk": 32, "num_hidden_layers": LAYERS, "num_nextn_predict_layers": 1}
    checkpoint = make_demo_model("v3.2", folder, overrides=overrides)
    return checkpoint, run_engine(
        {name: scenarios[name] for name in ("plain", "prefix")},
        model=checkpoint,
        speculative_config={"method": "mtp", "num_speculative_tokens": 2},
        choices=True,
    )


@pytest.mark.parametrize("scenario", ["plain", "prefix"])
def test_all_tokens_chosen(dense, oracle, scenario):
    checkpoint, result, _ = dense
    outputs = result["scenarios"][scenario]["outputs"]
    agreed, differences = oracle(checkpoint, outputs)
    assert agreed == len(differences) == 128
    assert differences.max() < 1e-4
    if scenario == "prefix":
        assert [output["cached"] for output in outputs] == [256] * 4


def test_every_call_was_ours(dense):
    for name, scenario in dense[1]["scenarios"].items():
        before, after, outputs = scenario["before"], scenario["after"], scenario["outputs"]
        done = {k: after[k] - before[k] for k in after if isinstance(after[k], int)}
        assert done["indexer_calls"] == LAYERS * done["sparse_steps"]
        assert done["forward_mqa_tokens"] == done["indexer_tokens"] > 0
        fed = sum(len(o["prompt"]) - o["cached"] + len(o["tokens"]) - 1 for o in outputs)
        assert done["forward_mqa_tokens"] + done["forward_mha_tokens"] == LAYERS * fed
        assert done["forward_mha_calls"] == LAYERS * done["prefill_steps"]
        # Behind 256 cached tokens chunks of at most 128 are better absorbed.
        assert (done["prefill_steps"] > 0) is (dense[2] and name == "plain")
        assert done["decode_steps"] == 0
        assert done["checked_steps"] == done["sparse_steps"]
        assert after["sparse"]["impl"] == "torch"
    # 497 prompt tokens in chunks of at most 128.
    assert dense[1]["scenarios"]["plain"]["after"]["sparse_steps"] >= 4 + 31


@pytest.mark.parametrize("scenario", ["plain", "prefix"])
def test_32_tokens_chosen(sparse, oracle, scenario):
    checkpoint, result = sparse
    choices = torch.load(result["choices"])[scenario]
    gaps = []
    for output, chosen in zip(result["scenarios"][scenario]["outputs"], choices, strict=True):
        assert len(chosen) == LAYERS + 1  # the draft layer
        with following(chosen) as follow:
            agreed, differences = oracle(checkpoint, [output])
        assert agreed == len(differences) == 32
        assert differences.max() < 1e-4
        gaps += follow.gaps
    gaps = torch.tensor(gaps)
    assert len(gaps) > 300
    assert (gaps > 0).float().mean() < 0.02
    assert gaps.max() < 0.05
