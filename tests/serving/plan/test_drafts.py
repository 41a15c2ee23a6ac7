# SPDX-License-Identifier: Apache-2.0
"""Steps of several new tokens a request: speculative decoding, by the model's own MTP layers."""

import json

import pytest
from mla_serving.plan import cost, rates, report
from mla_serving.plan.config import from_config
from mla_serving.plan.layout import GIB, Layout

from mla_backend.attention import support
from tests.serving.plan.plan_models import (
    DENSE_MODEL,
    EMBEDDING,
    EXPERT,
    FP8,
    ROOT,
    V3,
    V32,
    config,
    question,
)

H, LAYERS, MTP = 7168, 61, 1
ROOM = {"memory": 10_000 * GIB}


def model(folder=V3, **changes):
    settings = {"num_hidden_layers": LAYERS, "num_nextn_predict_layers": MTP, **changes}
    return from_config(config(folder, **settings), "m")


def plan(of, tp=8, pp=1, **changes):
    return cost.make(question(of, Layout(tp=tp, pp=pp, ep=True), **(ROOM | changes)))


def test_weights_of_a_layer_for_mtp():
    without, with_it = (plan(model(), drafts=n).weights for n in (0, 1))
    assert without == plan(model(num_nextn_predict_layers=0), drafts=1).weights
    assert with_it["MTP"] == (2 * H * H + 3 * H) * 2
    layers = LAYERS - 3
    assert with_it["routed experts"] == pytest.approx(
        without["routed experts"] / layers * (layers + 1)
    )
    assert with_it["attention"] == pytest.approx(without["attention"] / LAYERS * (LAYERS + 1))
    assert with_it["embeddings"] == without["embeddings"]  # the model's own


def test_it_is_of_the_last_stage_with_an_embedding_of_its_own():
    layout, of = Layout(tp=8, pp=2, ep=True), model(quantization_config=FP8)
    first, last = layout.stages(LAYERS, MTP)
    assert (len(first), len(last)) == (31, 30 + MTP)
    assert layout.weights(of, first)["embeddings"] == EMBEDDING / 8 * 2
    assert layout.weights(of, last)["embeddings"] == 2 * EMBEDDING / 8 * 2
    assert "MTP" not in layout.weights(of, first)
    experts = layout.weights(of, last)["routed experts"]
    assert experts == pytest.approx((30 + MTP) * 32 * EXPERT * (1 + 4 / 128**2))


def test_it_has_a_cache():
    assert plan(model()).token_bytes == LAYERS * 576 * 2
    assert plan(model(), drafts=1).token_bytes == (LAYERS + MTP) * 576 * 2
    assert plan(model(num_nextn_predict_layers=0), drafts=1).token_bytes == LAYERS * 576 * 2
    # Its indexer is its own, where only every fourth of the others is.
    sparse = model(V32, index_topk_freq=4)
    rows = (LAYERS + MTP) * 576 * 2 + (len(range(2, LAYERS, 4)) + 1 + MTP) * 132
    assert plan(sparse, drafts=1).token_bytes == rows


def test_floor_of_several_tokens():
    """They read the same rows."""
    load = {"batch": 96, "context": 16384}
    few, many = ({"num_attention_heads": 8}, "memory"), ({"num_attention_heads": 128}, "compute")
    for (heads, bound), factor in ((few, 1), (many, 2)):
        of = model(**heads, num_nextn_predict_layers=0)
        one, two = (plan(of, tp=1, drafts=n, **load).attention for n in (0, 1))
        assert one.bound == two.bound == bound
        assert two.floor_us == pytest.approx(factor * one.floor_us)


def test_measured_times_of_several_tokens():
    cases = rates.load("h200").cases[rates.DENSE]
    of = {case.name: case.us for case in cases if case.kernel == "hopper"}
    for heads, batch, new in ((128, 96, 2), (16, 64, 2), (16, 64, 4)):
        name = f"b{batch}_h{heads}_q{new}_k4096"
        load = {"batch": batch, "context": 4096, "drafts": new - 1}
        kernel = plan(model(num_attention_heads=heads), tp=1, **load).attention.kernels["attention"]
        assert kernel.case == name
        assert kernel.us == pytest.approx((LAYERS + MTP) * of[name])


@pytest.mark.parametrize("heads, new", [(128, 2), (16, 2)])
def test_tokens_of_sparse_attention_choose_for_themselves(heads, new):
    rows = json.loads((ROOT / "benchmarks/results/h200/sparse.json").read_text())["rows"]
    case = f"b128_h{heads}_q{new}_32k_fp8_ds_mla"
    ours = [r["us"] for r in rows if r["case"] == case and r["impl"].startswith("mla_kernels/")]
    load = {"batch": 128, "context": 32768, "kv_cache_dtype": "fp8_ds_mla"}
    of = model(V32, num_attention_heads=heads)
    one, two = (plan(of, tp=1, drafts=n, **load).attention.kernels for n in (0, new - 1))
    assert two["attention"].us / (LAYERS + MTP) == pytest.approx(min(ours), rel=0.1)
    # The indexer's tokens read the same keys.
    assert 1 < two["indexer"].us / one["indexer"].us < 2


def test_how_many_drafts():
    most = support.MAX_QUERY_LEN - 1
    plan(model(), drafts=most)
    said = f"Expected --speculative-tokens up to {most} for dense attention, .* got {most + 1}"
    with pytest.raises(ValueError, match=said):
        plan(model(), drafts=most + 1)
    plan(model(V32), drafts=most + 1)  # a token is a row there


@pytest.mark.parametrize("folder", [V3, V32])
def test_several_mtp_layers_draft_in_whole_turns(folder):
    """As vLLM's SpeculativeConfig asks: some of them once, or all of them some times."""
    three = model(folder, num_nextn_predict_layers=3)
    for drafts in (1, 2, 3, 6):
        plan(three, drafts=drafts)
    for drafts in (4, 5, 7):
        said = f"up to 3 or a multiple of it for the 3 MTP layers of m, got {drafts}"
        with pytest.raises(ValueError, match=f"Expected --speculative-tokens {said}"):
            plan(three, drafts=drafts)


def test_the_report_says_what_is_counted():
    with_it = report.as_text(plan(model(), drafts=2))
    assert "61 layers, 128 heads, 256 experts; 1 more for MTP; encoders of images" in with_it
    assert "62 layers x 1152" in with_it and "8,192 tokens" not in with_it
    assert "64 requests of 4,096 tokens, 3 new ones each (what makes drafts after the" in with_it
    dense = model(**DENSE_MODEL, num_nextn_predict_layers=0)
    assert "; weights and cache of a draft model and encoders" in report.as_text(
        plan(dense, drafts=2)
    )
    answer = json.loads(report.as_json(plan(model(), drafts=2)))
    assert (answer["model"]["mtp_layers"], answer["load"]["speculative_tokens"]) == (1, 2)
    assert json.loads(report.as_json(plan(model())))["model"]["mtp_layers"] == 0
