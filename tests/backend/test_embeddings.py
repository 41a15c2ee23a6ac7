# SPDX-License-Identifier: Apache-2.0
"""Engines that embed prompts (vLLM's runner "pooling") against transformers' own model."""

import pytest
import torch
from follow import following
from mla_serving.demo_model import make_demo_model
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.engine


def embedding(model, prompt):
    """Of the token before the last."""
    with torch.no_grad():
        state = model(torch.tensor([[*prompt, 0]])).last_hidden_state[0, -2]
    return state / state.norm()


def load(checkpoint):
    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval().model


@pytest.mark.parametrize("family", ["v2-lite", "v3"])
def test_embeddings_are_those_of_transformers(family, run_engine, scenarios, demo_checkpoint):
    """Prompts that join while others run, longer than a chunk of prefill, and of one token."""
    checkpoint = demo_checkpoint(family)
    engine = {"runner": "pooling", "env": {"MLA_BACKEND_CHECK": "1"}}
    result = run_engine({"churn": scenarios["churn"]}, model=checkpoint, **engine)["scenarios"]
    assert result["churn"]["after"]["forward_mha_calls"] > 0
    outputs, model = result["churn"]["outputs"], load(checkpoint)
    lengths = {len(output["prompt"]) for output in outputs}
    assert min(lengths) == 1 and max(lengths) > 256
    for output in outputs:
        found = torch.tensor(output["embedding"])
        assert (found - embedding(model, output["prompt"])).abs().max() < 1e-5


def test_sparse_embeddings_are_those_of_what_was_chosen(run_engine, scenarios, tmp_path):
    """32 tokens of up to 300 are read; transformers reads the same."""
    overrides = {"index_topk": 32, "num_hidden_layers": 3}
    checkpoint = make_demo_model("v3.2", tmp_path / "model", overrides=overrides)
    requests = {"plain": scenarios["plain"]}
    result = run_engine(requests, model=checkpoint, runner="pooling", choices=True)
    choices, model, gaps = torch.load(result["choices"])["plain"], load(checkpoint), []
    for output, chosen in zip(result["scenarios"]["plain"]["outputs"], choices, strict=True):
        with following(chosen) as follow:
            expected = embedding(model, output["prompt"])
        gaps += follow.gaps
        assert (torch.tensor(output["embedding"]) - expected).abs().max() < 1e-5
    assert len(gaps) > 300 and max(gaps) < 0.05
