# SPDX-License-Identifier: Apache-2.0
"""The least time of attention, worked out by hand."""

import pytest
from mla_serving.plan import cost, rates, report
from mla_serving.plan.config import from_config
from mla_serving.plan.layout import GIB, Layout

from tests.serving.plan.plan_models import FP8, ROOFS, V32, config, question


def test_attention_floor_by_hand(v3, v32):
    # 128 heads: 2 * 64 * 128 * 4096 * 1088 = 73.0 GFLOP, 146.03 us at 500 TFLOPS; 75.5 us to read
    plan = cost.make(question(v3, Layout(tp=1, dp=8, ep=True), rates=ROOFS, batch=512))
    assert plan.attention.floor_us == pytest.approx(61 * 146.0289, rel=1e-4)
    assert plan.attention.bound == "compute"
    # 505 requests over 8 engines: 64 of one of them
    uneven = cost.make(question(v3, Layout(tp=1, dp=8, ep=True), rates=ROOFS, batch=505))
    assert uneven.attention.floor_us == plan.attention.floor_us
    # 16 heads: 64 * 4096 * 1152 bytes = 302 MB, 75.50 us at 4000 GB/s
    plan = cost.make(question(v3, Layout(tp=8), rates=ROOFS))
    assert plan.attention.floor_us == pytest.approx(61 * 75.4975, rel=1e-4)
    assert plan.attention.bound == "memory"
    # dcp 8: all 128 heads over 512 tokens
    plan = cost.make(question(v3, Layout(tp=8, dcp=8), rates=ROOFS))
    assert plan.attention.floor_us == pytest.approx(61 * 146.0289 / 8, rel=1e-4)
    # sparse: 2048 of 16384 tokens, 656 bytes each, and 132 for every key of the indexer
    sparse = {"rates": ROOFS, "kv_cache_dtype": "fp8_ds_mla", "context": 16384}
    plan = cost.make(question(v32, Layout(tp=8), **sparse))
    read = 64 * (2048 * 656 + 16384 * 132)
    assert plan.attention.floor_us == pytest.approx(61 * read / 4000e3, rel=1e-4)
    assert plan.attention.measured_us is None  # by hand there are only roofs
    # a context shorter than what is chosen of it
    short = cost.make(question(v32, Layout(tp=8), **sparse | {"context": 1024}))
    read = 64 * 1024 * (656 + 132)
    assert short.attention.floor_us == pytest.approx(61 * read / 4000e3, rel=1e-4)
    # dcp 8: all 128 heads over an eighth of those tokens, 2 * 64 * 128 * 256 * 1088 = 4.56 GFLOP,
    # and 64 index heads of 128 over an eighth of the keys, 2 * 64 * 64 * 2048 * 128 = 2.15 GFLOP
    plan = cost.make(question(v32, Layout(tp=8, dcp=8), **sparse))
    assert plan.attention.floor_us == pytest.approx(61 * 13.4218, rel=1e-4)


def test_an_indexer_multiplies_every_key_with_every_head(v32):
    slow = rates.Rates("test", read_gbps=4000, gemm_tflops=100, cases={})
    sparse = {"rates": slow, "kv_cache_dtype": "fp8_ds_mla", "context": 16384}
    times = cost.make(question(v32, Layout(tp=8), **sparse)).attention
    flop = 2 * 64 * (16 * 2048 * 1088 + 16384 * 64 * 128)
    assert times.floor_us == pytest.approx(61 * flop / 100e6) and times.bound == "compute"


def test_the_largest_stage_is_the_one_with_more_indexers():
    changes = {"num_hidden_layers": 60, "index_topk_pattern": "S" * 30 + "F" * 30}
    model = from_config(config(V32, **changes), "m")
    sparse = {"kv_cache_dtype": "fp8_ds_mla", "context": 16384, "memory": 200 * GIB}
    plan = cost.make(question(model, Layout(tp=8, pp=2), rates=ROOFS, **sparse))
    read = 64 * 30 * (2048 * 656 + 16384 * 132)
    assert plan.attention.floor_us == pytest.approx(read / 4000e3, rel=1e-4)


def test_the_slowest_stage_may_have_fewer_layers():
    """Over a long context indexers read more than attention: 15 layers with 5 of them take longer
    than 16 with 4."""
    stages = [(15, 5), (15, 4), (16, 4), (15, 3)]
    pattern = "".join(("F" * indexers).ljust(layers, "S") for layers, indexers in stages)
    layers = {"num_hidden_layers": 61, "index_topk_pattern": pattern, "quantization_config": FP8}
    model, layout = from_config(config(V32, **layers), "m"), Layout(tp=8, pp=4)
    assert [(len(x), model.indexers(x)) for x in layout.stages(61)] == stages
    sparse = {"kv_cache_dtype": "fp8_ds_mla", "context": 131_072}
    plan = cost.make(question(model, layout, rates=ROOFS, **sparse))
    read = 64 * (15 * 2048 * 656 + 5 * 131_072 * 132)
    assert plan.attention.floor_us == pytest.approx(read / 4000e3, rel=1e-4)
    assert "in the slowest of its stages" in report.as_text(plan)
