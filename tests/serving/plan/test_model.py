# SPDX-License-Identifier: Apache-2.0
"""A model by its config.json: its parameters, and configs that are refused."""

import pytest
from mla_serving.plan import cost
from mla_serving.plan.config import from_config, load
from mla_serving.plan.layout import Layout
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.serving.plan.plan_models import (
    DENSE,
    DENSE_MODEL,
    EMBEDDING,
    EXPERT,
    FP8,
    KV_A,
    KV_B,
    NORMS,
    O_PROJ,
    Q_A,
    Q_B,
    REAL,
    ROUTER,
    V3,
    V32,
    config,
    question,
    weights,
)


def test_parameters_of_v3(v3):
    attention = Q_A + Q_B + KV_A + KV_B + O_PROJ
    layers = 61 * (attention + NORMS) + 3 * DENSE + 58 * (257 * EXPERT + ROUTER)
    assert v3.parameters == layers + 2 * EMBEDDING + 7168 == 671_026_419_200


def test_a_tied_head_is_the_embedding():
    tied = from_config(config(V3, tie_word_embeddings=True), "tied")
    assert tied.parameters == from_config(config(V3), "m").parameters - EMBEDDING
    assert weights(Layout(tp=8), tied)["embeddings"] == EMBEDDING / 8 * 2


def test_every_other_layer_may_be_a_moe_layer():
    odd = from_config(config(V3, num_hidden_layers=8, moe_layer_freq=2), "odd")
    assert [layer for layer in range(8) if odd.is_moe(layer)] == [4, 6]  # of 3 and more


def test_parameters_of_v2_lite(lite):
    assert lite.parameters == 15_706_484_224  # bytes of the released bf16 files / 2


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"kv_lora_rank": None}, "does not use multi-head latent attention"),
        ({"hidden_size": None}, "config.json lacks hidden_size"),
        ({"num_hidden_layers": None}, "config.json lacks num_hidden_layers"),
        (
            {"num_hidden_layers": None, "num_layers": 28},
            "model_type longcat_flash only, got deepseek_v3",
        ),
        ({"moe_intermediate_size": None}, "lacks moe_intermediate_size"),
        ({"torch_dtype": "float64"}, "got float64"),
        ({"linear_attn_config": {"kda_layers": [1]}}, "m: config.json has linear_attn_config: not"),
        ({"layer_types": ["linear_attention", "full_attention"]}, "has linear_attention in layer_"),
        ({"layer_group_size": 5}, "has layer_group_size"),
        ({"layer_types": 5, "hidden_size": None}, "lacks hidden_size"),
        ({"learnable_sink": True}, "has learnable attention sinks, which the vLLM backend refuses"),
        ({"model_type": "hy_v4"}, "learnable attention sinks"),
        ({"is_causal": False}, "has is_causal false"),
        ({"index_kpool": 16}, "has index_kpool 16"),
        ({"model_type": "dots3_note"}, "model_type dots3_note"),
        ({"language_config": "x"}, "expected a mapping as language_config, got 'x'"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantised by awq.*--weight-bits"),
        ({"quantization_config": "fp8"}, "expected a mapping as quantization_config, got 'fp8'"),
        ({"text_config": "x"}, "expected a mapping as text_config, got 'x'"),
        ({"num_attention_heads": "128"}, "num_attention_heads an integer of 1 or more, got '128'"),
        ({"num_attention_heads": -128}, "num_attention_heads an integer of 1 or more, got -128"),
        ({"num_attention_heads": 128.0}, "num_attention_heads an integer of 1 or more, got 128.0"),
        ({"num_hidden_layers": 0}, "num_hidden_layers an integer of 1 or more, got 0"),
        ({"num_hidden_layers": True}, "num_hidden_layers an integer of 1 or more, got True"),
        ({"num_hidden_layers": 10_001}, "num_hidden_layers an integer of up to 10000, got 10001"),
        ({"hidden_size": 10**400}, "hidden_size an integer of up to 1000000000, got 1000"),
        ({"hidden_size": []}, r"hidden_size an integer of 1 or more, got \[\]"),
        ({"kv_lora_rank": "512"}, "kv_lora_rank an integer of 1 or more, got '512'"),
        ({"qk_rope_head_dim": -1}, "qk_rope_head_dim an integer of 0 or more, got -1"),
        ({"q_lora_rank": "a"}, "q_lora_rank an integer of 1 or more, got 'a'"),
        ({"n_routed_experts": "x"}, "n_routed_experts an integer of 0 or more, got 'x'"),
        ({"moe_intermediate_size": -1}, "moe_intermediate_size an integer of 1 or more, got -1"),
        ({"n_shared_experts": -1}, "n_shared_experts an integer of 0 or more, got -1"),
        ({"first_k_dense_replace": "x"}, "first_k_dense_replace an integer of 0 or more, got 'x'"),
        ({"moe_layer_freq": 0}, "moe_layer_freq an integer of 1 or more, got 0"),
        ({"index_topk": "x"}, "index_topk an integer of 0 or more, got 'x'"),
        ({"index_topk": 2048}, "config.json lacks index_n_heads"),
        ({"index_topk": 2048, "index_n_heads": 64}, "config.json lacks index_head_dim"),
        ({"index_topk_freq": "x"}, "index_topk_freq an integer of 1 or more, got 'x'"),
        ({"index_topk_freq": 0}, "index_topk_freq an integer of 1 or more, got 0"),
        ({"index_skip_topk_offset": "x"}, "index_skip_topk_offset an integer of 0 or more, got"),
        ({"index_topk_pattern": 5}, "a letter for each layer as index_topk_pattern, got 5"),
        *(
            (
                {"quantization_config": FP8 | {"weight_block_size": block}},
                "weight_block_size of two",
            )
            for block in (3, "x", [], [128], [0, 128], [128, "x"])
        ),
    ],
)
def test_configs_that_are_refused(changes, said):
    with pytest.raises(ValueError, match=said):
        from_config(config("deepseek-v3-5-layers", **changes), "m")


@pytest.mark.parametrize("key", ["num_experts", "num_local_experts", "moe_intermediate_size"])
@pytest.mark.parametrize("null", [True, False])
def test_experts_by_another_name_make_no_dense_model(key, null):
    settings = config(V3, **(DENSE_MODEL | {key: 64}))
    if not null:
        del settings["n_routed_experts"]
        settings["model_type"] = "other"
    said = f"m: config.json has {key} but no n_routed_experts: expected the number of experts "
    with pytest.raises(ValueError, match=said):
        from_config(settings, "m")
    for nothing in (None, 0):
        assert not from_config(settings | {key: nothing}, "m").experts
    assert not from_config(settings | {"n_routed_experts": 0}, "m").experts  # its own word


@pytest.mark.parametrize("name", REAL)
def test_real_shapes_are_planned(name):
    folder, changes, billions = REAL[name]
    model = from_config(config(folder, **changes), name)
    assert model.parameters / 1e9 == pytest.approx(billions, abs=0.1)
    assert cost.make(question(model, Layout(tp=4, pp=8), batch=1)).fits


def test_a_config_that_nests_beyond_reason_is_refused(tmp_path):
    path = tmp_path / "config.json"
    path.write_text("[" * 100_000)
    with pytest.raises(ValueError, match=r"config\.json is nested too deeply"):
        load(str(path))


# Of those without which the plan takes a part for none.
FILLED = {
    "glm4_moe_lite": ["q_lora_rank", "n_routed_experts", "n_shared_experts"],
    "deepseek_v3": ["q_lora_rank", "n_routed_experts", "n_shared_experts", "first_k_dense_replace"],
    "glm_moe_dsa": ["q_lora_rank", "n_routed_experts", "n_shared_experts", "first_k_dense_replace",
                    "index_topk"],
}  # fmt: skip


@pytest.mark.parametrize("kind, key", [(kind, key) for kind in FILLED for key in FILLED[kind]])
def test_a_key_for_which_vllm_takes_the_makers_number_is_not_none(kind, key):
    """transformers' classes, which vLLM reads these configs with, have defaults."""
    folder = V32 if kind == "glm_moe_dsa" else V3
    changes = DENSE_MODEL if key == "n_routed_experts" else {}
    without = config(folder, **changes, model_type=kind)
    del without[key]
    said = f"m: config.json lacks {key}, for which vLLM takes that of the maker's own model"
    with pytest.raises(ValueError, match=said):
        from_config(without, "m")
    assert CONFIG_MAPPING[kind]().to_dict()[key]
    from_config(without | {"model_type": "other"}, "m")
    from_config(without | {key: None}, "m")


def test_null_is_as_good_as_no_key():
    keys = ("q_lora_rank", "n_routed_experts", "n_shared_experts", "first_k_dense_replace",
            "index_topk", "index_topk_freq", "index_skip_topk_offset",
            "moe_intermediate_size")  # fmt: skip
    model = from_config(config(V3, **dict.fromkeys(keys)), "m")
    assert model.q_lora_rank is None and not model.experts and not model.sparse
    assert model.index_shared == frozenset()


def test_weight_bits_and_wrapped_configs():
    inner = config("deepseek-v3-5-layers")
    model = from_config({"model_type": "x", "text_config": inner}, "wrapped", weight_bits=4)
    assert model.scheme.bits == 4 and model.layers == 5
    model = from_config({"text_config": inner, "quantization_config": FP8}, "wrapped")
    assert model.scheme.bits == 8 + 32 / 128**2
    assert from_config({"language_config": inner}, "DeepSeek-VL2").layers == 5


def test_a_checkpoint_in_fp32_is_served_in_bf16():
    """As vLLM's --dtype auto does it, on GPUs."""
    model = from_config(config(V3, torch_dtype="float32"), "m")
    assert model == from_config(config(V3, torch_dtype="bfloat16"), "m")


def test_a_wrappers_dtype_is_the_models():
    inner = config(V3)
    inner.pop("torch_dtype", None)
    for key in ("dtype", "torch_dtype"):
        assert from_config({"text_config": inner, key: "float16"}, "m").dtype == "float16"
    both = {"text_config": {**inner, "dtype": "bfloat16"}, "torch_dtype": "float16"}
    assert from_config(both, "m").dtype == "float16"
