# SPDX-License-Identifier: Apache-2.0
"""Weights of a GPU by how vLLM spreads a model, and layouts that are refused."""

import inspect
from dataclasses import replace

import pytest
from mla_serving.plan.config import from_config, load
from mla_serving.plan.layout import Layout

from tests.serving.plan.plan_models import (
    DENSE,
    DENSE_MODEL,
    EMBEDDING,
    EXPERT,
    FP8,
    KV_A,
    KV_B,
    MODELS,
    NORMS,
    O_PROJ,
    Q_A,
    Q_B,
    REAL,
    ROUTER,
    V3,
    V32,
    config,
    weights,
)


def test_weights_of_v3_fp8_tp8(v3):
    fp8 = 1 + 4 / 128**2
    parts = weights(Layout(tp=8), v3)
    assert parts["routed experts"] == pytest.approx(58 * 32 * EXPERT * fp8)
    assert parts["dense MLPs"] == pytest.approx(3 * DENSE / 8 * fp8)
    attention = Q_A + KV_A + (Q_B + KV_B + O_PROJ) / 8
    assert parts["attention"] == pytest.approx(61 * (attention * fp8 + NORMS * 2))
    assert parts["absorbed W_UK, W_UV"] == 61 * KV_B / 8 * 2
    assert parts["embeddings"] == 2 * EMBEDDING / 8 * 2
    shared = 58 * (EXPERT / 8 * fp8 + ROUTER * 2)
    assert parts["shared experts, routers"] == pytest.approx(shared)
    assert sum(parts.values()) == pytest.approx(85.396e9, rel=1e-4)


def test_weights_of_v3_with_expert_parallelism_over_dp(v3):
    parts = weights(Layout(tp=1, dp=8, ep=True), v3)
    fp8 = 1 + 4 / 128**2
    assert parts["routed experts"] == pytest.approx(58 * 32 * EXPERT * fp8)
    attention = Q_A + KV_A + Q_B + KV_B + O_PROJ  # whole on every GPU
    assert parts["attention"] == pytest.approx(61 * (attention * fp8 + NORMS * 2))
    assert parts["dense MLPs"] == pytest.approx(3 * DENSE * fp8)
    # 256 experts over 24 GPUs: some have 11
    parts = weights(Layout(tp=8, dp=3, ep=True), v3)
    assert parts["routed experts"] == pytest.approx(58 * 11 * EXPERT * fp8)


@pytest.mark.parametrize("tp, dp, ep, slices", [(2, 4, True, 1), (8, 1, True, 8), (2, 4, False, 2)])
def test_shared_experts_are_whole_where_their_tokens_are_split(v3, tp, dp, ep, slices):
    parts = weights(Layout(tp=tp, dp=dp, ep=ep), v3)
    shared = EXPERT / slices * (1 + 4 / 128**2) + ROUTER * 2
    assert parts["shared experts, routers"] == pytest.approx(58 * shared)


def test_shared_experts_of_a_model_that_never_splits_tokens_are_cut():
    folder, changes, _ = REAL["GLM-4.7-Flash"]
    flash = from_config(config(folder, **changes), "flash")
    shared = 46 * (3 * 2048 * 1536 / 4 + 64 * (2048 + 1)) * 2
    for layout in (Layout(tp=4), Layout(tp=4, dp=2, ep=True)):
        layout.check(flash)
        assert weights(layout, flash)["shared experts, routers"] == shared
    odd = replace(flash, expert_width=1537)
    with pytest.raises(ValueError, match="4 GPUs cannot slice shared experts of width 1537"):
        Layout(tp=4, dp=2, ep=True).check(odd)


def test_dense_mlps_of_sparse_models_are_whole_where_tokens_are_split(v32, v3):
    """In vLLM's model for CUDA, if there is no pipeline."""
    mlps = 3 * DENSE * (1 + 4 / 128**2)
    whole = Layout(tp=4, dp=2, ep=True)
    assert weights(whole, v32)["dense MLPs"] == pytest.approx(mlps)
    for cut in (Layout(tp=4), Layout(tp=4, ep=True), Layout(tp=4, dp=2)):
        assert weights(cut, v32)["dense MLPs"] == pytest.approx(mlps / 4)
    assert weights(whole, v3)["dense MLPs"] == pytest.approx(mlps / 4)
    piped = Layout(tp=4, dp=2, pp=2, ep=True)
    parts = piped.weights(v32, piped.stages(61)[0])
    assert parts["dense MLPs"] == pytest.approx(mlps / 4)
    odd = {"intermediate_size": 18_431, "quantization_config": None}
    whole.check(from_config(config(V32, **odd), "whole"))
    with pytest.raises(ValueError, match="4 GPUs cannot slice dense MLPs of width 18431"):
        whole.check(from_config(config(V3, **odd), "cut"))


@pytest.mark.parametrize("name", ["V3", "V3.2", "GLM-5"])
def test_ranks_that_share_a_cache_hold_no_more_weights(name):
    folder, changes, _ = REAL[name]
    model = from_config(config(folder, **changes), name)
    alone = weights(Layout(tp=8), model)
    assert all(weights(Layout(tp=8, dcp=dcp), model) == alone for dcp in (2, 4, 8))


def test_vllms_model_of_glm_5_on_gpus_does_not_replicate_queries():
    """Its config asks for that, `dcp_q_replicate`: q_b_proj of all heads of a group on each rank.
    Only the generic model, of CPUs, does it: if this fails, the plan has to count them."""
    from vllm.model_executor.models import deepseek_v2

    of_gpus = pytest.importorskip("vllm.models.deepseek_v32.attention")  # 0.26 has it elsewhere
    assert "DCPGroupColumnParallelLinear" in vars(deepseek_v2)
    assert "DCPGroupColumnParallelLinear" not in vars(of_gpus)
    assert "dcp_q_replicate" not in inspect.getsource(of_gpus.DeepseekV32Attention)


def test_bf16_weights_have_no_scales_and_no_second_kv_b(lite):
    parts = weights(Layout(tp=1), lite)
    assert sum(parts.values()) == 2 * (lite.parameters - 2048)  # the final norm is left out


def test_pipeline_stages_are_those_of_vllm(v3):
    from vllm.distributed.utils import get_pp_indices

    for pp in (1, 2, 3, 4, 7, 8):
        theirs = [get_pp_indices(61, rank, pp) for rank in range(pp)]
        assert [(s.start, s.stop) for s in Layout(tp=1, pp=pp).stages(61)] == theirs
    whole = sum(weights(Layout(tp=8), v3).values())
    half = sum(weights(Layout(tp=8, pp=2), v3).values())
    assert 0.5 * whole < half < 0.54 * whole
    assert weights(Layout(tp=8, pp=2), v3)["embeddings"] == EMBEDDING / 8 * 2  # one of the two


@pytest.mark.parametrize(
    "folder, changes, layout, said",
    [
        (V3, {}, {"tp": 8, "dp": 4}, "32 GPUs cannot slice experts of width 2048 in blocks of 128. "
         "Mend: --expert-parallel, or more stages"),
        (V3, {}, {"tp": 32, "ep": True}, "32 GPUs cannot slice dense MLPs of width 18432 in blocks "
         "of 128. Mend: a lower --tp"),
        (V3, {"first_k_dense_replace": 0}, {"tp": 32, "ep": True}, "shared experts of width 2048 "),
        (V3, DENSE_MODEL, {"tp": 32}, "dense MLPs of width 18432 in blocks of 128"),
        (V3, DENSE_MODEL, {"tp": 128}, "queries of width 24576 in blocks of 128"),
        ("deepseek-v2-lite", {}, {"tp": 2}, "dense MLPs of width 10944 in blocks of 128"),
        ("deepseek-v2-lite", {"intermediate_size": 10941, "quantization_config": None}, {"tp": 2},
         "2 GPUs cannot slice dense MLPs of width 10941. Mend"),
        *((V3, {"quantization_config": FP8 | {"weight_block_size": block}}, {"tp": 16},
           "dense MLPs of width 18432 in blocks of 256") for block in ([256, 128], [128, 256])),
    ],
)  # fmt: skip
def test_slices_that_cut_a_block_are_refused(folder, changes, layout, said):
    model = from_config(config(folder, quantization_config=FP8) | changes, "m")
    with pytest.raises(ValueError, match=said):
        Layout(**layout).check(model)


def test_the_most_that_a_layout_can_be():
    five = from_config(config(V3), "m")
    Layout(tp=1, pp=5).check(five)
    Layout(tp=8, dp=32, ep=True).check(five)  # an expert a GPU
    Layout(tp=8, ep=True).check(from_config(config(V3, **DENSE_MODEL), "dense"))


def test_slices_of_whole_blocks_are_planned(v3):
    Layout(tp=8, dp=4, ep=True).check(v3)
    of_tensors = {"quant_method": "fp8", "activation_scheme": "static"}  # one scale a tensor
    lite = "deepseek-v2-lite"
    Layout(tp=2).check(from_config(config(lite, quantization_config=of_tensors), "x"))
    Layout(tp=1).check(from_config(config(lite, quantization_config=FP8), "x"))
    no_dense = config(lite, first_k_dense_replace=0, intermediate_size=10_941)
    Layout(tp=2).check(from_config(no_dense, "x"))
    plain = FP8 | {
        "ignored_layers": [f"model.layers.0.mlp.{x}_proj" for x in ("gate", "up", "down")]
    }
    Layout(tp=2, ep=True).check(from_config(config(lite, quantization_config=plain), "x"))


def test_the_table_of_models_is_current():
    readme = (MODELS / "README.md").read_text()
    for folder in sorted(path.parent.name for path in MODELS.glob("*/config.json")):
        gigabytes = sum(weights(Layout(tp=1), load(str(MODELS / folder))).values()) / 1e9
        row = next(line for line in readme.splitlines() if line.startswith(f"| `{folder}`"))
        assert row.endswith(f"| {gigabytes:.1f} GB |")
