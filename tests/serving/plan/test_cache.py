# SPDX-License-Identifier: Apache-2.0
"""Bytes of the KV cache, and the tokens and requests that fit."""

import pytest
from mla_serving.plan import cost, report
from mla_serving.plan.config import from_config
from mla_serving.plan.kv_cache import indexer_row_bytes, row_bytes
from mla_serving.plan.layout import GIB, Layout

from tests.serving.plan.plan_models import FP8, REAL, ROOFS, V32, config, question, weights


@pytest.mark.parametrize(
    "dtype, a_row, a_token",
    [
        ("bfloat16", 576 * 2, 70_272),
        ("fp8", 576, 35_136),
        ("fp8_ds_mla", 656, 40_016),
    ],
)
def test_cache_bytes_of_v3(v3, dtype, a_row, a_token):
    assert row_bytes(v3, dtype) == a_row
    assert 61 * row_bytes(v3, dtype) == a_token
    assert indexer_row_bytes(v3) == 0


def test_cache_bytes_of_v32(v32):
    assert indexer_row_bytes(v32) == 132
    assert 61 * (row_bytes(v32, "fp8_ds_mla") + indexer_row_bytes(v32)) == 48_068


@pytest.mark.parametrize(
    "changes, indexers",
    [
        ({"index_topk_freq": 4}, 16),  # layers 0, 1, 5, 9, ..., 57
        ({"index_topk_freq": 4, "index_skip_topk_offset": 3}, 17),  # 0, 1, 2, 6, ..., 58
        ({"index_topk_pattern": "FS" * 30}, 31),  # the last layer is not in it
    ],
)
def test_layers_that_share_an_indexer_have_no_cache_of_keys(v32, changes, indexers):
    changes |= {"num_hidden_layers": 61, "quantization_config": FP8}
    shared = from_config(config(V32, **changes), "shared")
    assert shared.indexers(range(61)) == indexers and v32.indexers(range(61)) == 61
    layout = Layout(tp=8)
    plan = cost.make(question(shared, layout, kv_cache_dtype="fp8_ds_mla"))
    assert plan.token_bytes == plan.gpu_token_bytes == 61 * 656 + indexers * 132
    indexer = 1536 * 64 * 128 + 7168 * 128 + 7168 * 64 + 256
    assert v32.parameters - shared.parameters == (61 - indexers) * indexer
    less = weights(layout, v32)["attention"] - weights(layout, shared)["attention"]
    quantised = 1536 * 64 * 128  # of wq_b; vLLM joins wk with the head weights, in bf16
    each = quantised * (1 + 4 / 128**2) + (indexer - quantised) * 2
    assert less == pytest.approx((61 - indexers) * each)
    load = {"rates": ROOFS, "kv_cache_dtype": "fp8_ds_mla", "context": 16384}
    times = cost.make(question(shared, layout, **load)).attention
    read = 64 * (61 * 2048 * 656 + indexers * 16384 * 132)
    assert times.floor_us == pytest.approx(read / 4000e3, rel=1e-4) and times.bound == "memory"


def test_stages_of_layers_that_share_an_indexer():
    """Each has to begin with a layer that chooses: vLLM passes no choice on."""
    shared = {"num_hidden_layers": 61, "index_topk_freq": 4, "quantization_config": FP8}
    # So that weights weigh little; the halves are layers 0 to 30 and 31 to 60.
    ample = {"layout": Layout(tp=4, pp=2), "kv_cache_dtype": "fp8_ds_mla", "memory": 1000 * GIB}
    model = from_config(config(V32, **shared, index_skip_topk_offset=4), "m")  # 0 to 3, 7, ..., 31
    halves = cost.make(question(model, **ample))
    assert halves.gpu_token_bytes == max(31 * 656 + 10 * 132, 30 * 656 + 8 * 132)
    model = from_config(config(V32, **shared), "m")  # 0, 1, 5, ..., 29, 33
    with pytest.raises(ValueError, match=r"--pp 2 begins a stage at layer 31 of m, which reads"):
        cost.make(question(model, **ample))


def test_tokens_that_fit(lite):
    plan = cost.make(question(lite, Layout(tp=1)))
    left = 0.9 * 140 * GIB - 6 * GIB - plan.weight_bytes
    assert plan.token_bytes == 27 * 1152
    assert plan.gpu_tokens == int(left // (27 * 1152) // 64) * 64
    assert plan.cluster_tokens == plan.gpu_tokens
    assert plan.requests_that_fit == plan.gpu_tokens // 4096


def test_tp_repeats_the_cache_and_dp_and_dcp_do_not(v3):
    tp = cost.make(question(v3, Layout(tp=8)))
    dcp = cost.make(question(v3, Layout(tp=8, dcp=4)))
    assert tp.cluster_tokens == tp.gpu_tokens == dcp.gpu_tokens
    assert dcp.cluster_tokens == 4 * tp.cluster_tokens
    dp = cost.make(question(v3, Layout(tp=1, dp=8, ep=True)))
    assert dp.cluster_tokens == 8 * dp.gpu_tokens
    assert dp.requests_that_fit == 8 * (dp.gpu_tokens // 4096)
    # a request of 4097 tokens over 4 ranks takes 17 blocks of each, 65 of one
    one_more = cost.make(question(v3, Layout(tp=8, dcp=4), context=4097))
    assert one_more.requests_that_fit == one_more.gpu_tokens // 64 // 17


@pytest.mark.parametrize("memory, layers", [(90, 30), (140, 31)])
def test_a_pipeline_holds_what_its_smallest_stage_does(v3, memory, layers):
    """30 layers with the head hold more weights, 31 with the embedding more cache a token."""
    layout = Layout(tp=8, pp=2)
    plan = cost.make(question(v3, layout, memory=memory * GIB))
    held = {
        stage: int((0.9 * memory - 6) * GIB - sum(layout.weights(v3, stage).values()))
        // (len(stage) * 1152)
        for stage in layout.stages(61)
    }
    fewest = min(held, key=held.get)
    assert plan.gpu_tokens == held[fewest] // 64 * 64 and len(fewest) == layers
    assert plan.gpu_token_bytes == layers * 1152 and plan.token_bytes == 61 * 1152
    assert plan.cluster_tokens == plan.gpu_tokens  # a request is in every stage
    assert plan.weights == layout.weights(v3, fewest)


def test_a_load_that_does_not_fit(lite):
    plan = cost.make(question(lite, Layout(tp=1), context=163_840))
    most = plan.requests_that_fit
    for batch, fits in ((most, True), (most + 1, False)):
        plan = cost.make(question(lite, Layout(tp=1), context=163_840, batch=batch))
        assert plan.fits is fits


def test_weights_that_leave_no_room_are_refused(lite):
    taken = sum(weights(Layout(tp=1), lite).values()) + 6 * GIB
    half = {"utilization": 0.5}
    plan = cost.make(question(lite, Layout(tp=1), memory=2 * (taken + GIB), **half))
    assert plan.cache_bytes == GIB
    with pytest.raises(ValueError, match="the weights of deepseek-v2-lite do not fit"):
        cost.make(question(lite, Layout(tp=1), memory=2 * taken, **half))


@pytest.mark.parametrize(
    "name, gpu, changes, asked, dtype",
    [
        ("GLM-5", "b200", {}, "auto", "fp8_e4m3"),
        ("GLM-5", "h200", {}, "auto", "bfloat16"),
        ("GLM-5", "b200", {}, "bfloat16", "bfloat16"),
        ("GLM-5", "b200", {"torch_dtype": "float16"}, "auto", "fp8_e4m3"),
        ("V3.2", "b200", {}, "auto", "bfloat16"),
    ],
)
def test_auto_is_fp8_for_glm_5_on_sm_10x(name, gpu, changes, asked, dtype):
    model = from_config(config(REAL[name][0], **REAL[name][1] | changes), name)
    big = {"gpu": gpu, "memory": 1000 * GIB, "rates": None, "kv_cache_dtype": asked}
    plan = cost.make(question(model, Layout(tp=4), **big))
    assert plan.kv_cache_dtype == dtype and plan.row_bytes == (576 if "fp8" in dtype else 1152)
    assert f" x {plan.row_bytes} + " in report.as_text(plan)
    assert f" x 132, {dtype}\n" in report.as_text(plan)


def test_fp8_ds_mla_is_for_512_and_64():
    odd = from_config(config("deepseek-v2-lite", kv_lora_rank=256), "odd")
    with pytest.raises(ValueError, match=r"512 \+ 64 elements, odd has 256 \+ 64"):
        row_bytes(odd, "fp8_ds_mla")
