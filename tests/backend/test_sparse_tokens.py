# SPDX-License-Identifier: Apache-2.0
"""Tokens and logprobs of DeepSeek-V3.2 engines against transformers' own model, in fp32."""

import pytest
import torch
from mla_serving.demo_model import make_demo_model

pytestmark = pytest.mark.engine

LAYERS = 3


@pytest.fixture(scope="module")
def dense(run_engine, scenarios, tmp_path_factory):
    """(checkpoint, result): index_topk beyond every context, so every token is read."""
    folder = tmp_path_factory.mktemp("v32-dense") / "model"
    checkpoint = make_demo_model(
        "v3.2", folder, overrides={"index_topk": 2048, "num_hidden_layers": LAYERS}
    )
    requests = {name: scenarios[name] for name in ("plain", "prefix")}
    return checkpoint, run_engine(requests, model=checkpoint, env={"MLA_BACKEND_CHECK": "1"})


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


def to_fp8_and_back(x, least):
    """e4m3 with one power-of-two scale for each row of the last dimension."""
    amax = x.abs().amax(-1, keepdim=True).clamp(min=least)
    scale = torch.exp2(torch.ceil(torch.log2(amax / 448)))
    return (x / scale).to(torch.float8_e4m3fn).float() * scale


class Follow:
    """In place of `DeepseekV32Indexer.forward`: the tokens that the engine chose, after a check.

    transformers leaves the fp8 rounding of queries and keys out; it is done here. A last bit of
    fp32 moves a few of them to the next code, so tokens whose scores all but tie change places, and
    then everything after them is another text. So transformers goes on with the engine's choice,
    and `gaps` says how far that is from its own: for every row the best score that was left out
    less the worst that was chosen, in standard deviations of the row's scores.
    """

    def __init__(self, choices):
        self.choices, self.sequence, self.gaps = choices, [], []

    def forward(self, indexer, hidden_states, q_resid, position_embeddings, *_, **__):
        from transformers.models.deepseek_v32.modeling_deepseek_v32 import apply_rotary_pos_emb

        rope = indexer.qk_rope_head_dim
        q = indexer.wq_b(q_resid).unflatten(-1, (indexer.n_heads, indexer.head_dim))
        k = indexer.k_norm(indexer.wk(hidden_states)).unsqueeze(2)
        rotated = apply_rotary_pos_emb(
            q[..., :rope], k[..., :rope], *position_embeddings, unsqueeze_dim=2
        )
        q = to_fp8_and_back(torch.cat([rotated[0], q[..., rope:]], -1)[0], 1e-10)
        k = to_fp8_and_back(torch.cat([rotated[1], k[..., rope:]], -1)[0, :, 0], 1e-4)
        weights = indexer.weights_proj(hidden_states)[0]
        scores = torch.einsum("sht,sh->st", torch.einsum("shd,td->sht", q, k).relu(), weights)

        S = len(self.sequence)
        taken = torch.zeros(S, indexer.index_topk, dtype=torch.int32)
        for position in range(S):
            prefix = " ".join(map(str, self.sequence[: position + 1]))
            if position == S - 1:  # not fed back to the engine; its output is not looked at
                assert prefix not in self.choices
                continue
            chosen = torch.tensor(self.choices[prefix][str(indexer.layer_idx)])
            assert len(chosen) == min(position + 1, indexer.index_topk)
            assert chosen.max() <= position
            taken[position, : len(chosen)] = chosen  # what is left names token 0 again
            left_out = torch.ones(position + 1, dtype=torch.bool)
            left_out[chosen] = False
            if left_out.any():
                row = scores[position, : position + 1]
                self.gaps.append((row[left_out].max() - row[chosen].min()) / row.std())
        return taken[None]


@pytest.mark.parametrize("scenario", ["plain", "prefix"])
def test_all_tokens_chosen(dense, oracle, scenario):
    checkpoint, result = dense
    outputs = result["scenarios"][scenario]["outputs"]
    agreed, differences = oracle(checkpoint, outputs)
    assert agreed == len(differences) == 128
    assert differences.max() < 1e-4
    if scenario == "prefix":
        assert [output["cached"] for output in outputs] == [256] * 4


def test_every_call_was_ours(dense):
    for scenario in dense[1]["scenarios"].values():
        before, after = scenario["before"], scenario["after"]
        done = {k: after[k] - before[k] for k in after if isinstance(after[k], int)}
        assert done["forward_mqa_calls"] == done["indexer_calls"] == LAYERS * done["sparse_steps"]
        assert done["forward_mqa_tokens"] == done["indexer_tokens"] > 0
        assert done["forward_mha_calls"] == done["decode_steps"] == 0
        assert done["checked_steps"] == done["sparse_steps"]
        assert after["sparse"]["impl"] == "torch"
    # 497 prompt tokens in chunks of at most 128.
    assert dense[1]["scenarios"]["plain"]["after"]["sparse_steps"] >= 4 + 31


@pytest.mark.parametrize("scenario", ["plain", "prefix"])
def test_32_tokens_chosen(sparse, oracle, scenario, monkeypatch):
    from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32Indexer

    checkpoint, result = sparse
    follow = Follow(result["choices"])
    monkeypatch.setattr(DeepseekV32Indexer, "forward", lambda *a, **k: follow.forward(*a, **k))
    for output in result["scenarios"][scenario]["outputs"]:
        follow.sequence = output["prompt"] + output["tokens"]
        agreed, differences = oracle(checkpoint, [output])
        assert agreed == len(differences) == 32
        assert differences.max() < 1e-4
    assert any(str(LAYERS) in layers for layers in result["choices"].values())  # the draft layer
    gaps = torch.tensor(follow.gaps)
    assert len(gaps) > 300
    assert (gaps > 0).float().mean() < 0.02
    assert gaps.max() < 0.05
