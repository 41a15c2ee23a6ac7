# SPDX-License-Identifier: Apache-2.0
"""LongCat-Flash, whose layers have two attentions and two dense MLPs beside their experts."""

import pytest
import torch
from mla_serving.plan import cost, report
from mla_serving.plan.config import from_config
from mla_serving.plan.layout import Layout
from transformers import LongcatFlashConfig, LongcatFlashForCausalLM

from tests.serving.plan.plan_models import FP8, V3, config, question, weights

LAYERS, HIDDEN = 28, 6144
EXPERT, DENSE = 3 * HIDDEN * 2048, 3 * HIDDEN * 12288
SHARDED = 1536 * 64 * 192 + 512 * 64 * 256 + 64 * 128 * HIDDEN  # by heads, of an attention
REPLICATED = HIDDEN * 1536 + HIDDEN * 576
NORMS = 2 * HIDDEN + 1536 + 512
KV_B = 512 * 64 * 256
ROUTER = (512 + 256) * (HIDDEN + 1)


def longcat(**changes):
    """As the checkpoints have it: without model_type."""
    settings = LongcatFlashConfig().to_dict() | {"architectures": ["LongcatFlashForCausalLM"]}
    return {**settings, "model_type": None, "dtype": "bfloat16", **changes}


def test_parameters_are_those_of_transformers_model():
    """It makes room for the zero experts' first matrix, too, which no checkpoint has."""
    with torch.device("meta"):
        model = LongcatFlashForCausalLM(LongcatFlashConfig())
    count = sum(weight.numel() for weight in model.parameters())
    count += sum(b.numel() for name, b in model.named_buffers() if "e_score_correction" in name)
    planned = from_config(longcat(), "m").parameters
    assert planned == count - LAYERS * 256 * 2 * HIDDEN * 2048 == 560_664_980_480


@pytest.mark.parametrize("kind", [{}, {"model_type": "longcat_flash", "architectures": None}])
def test_every_attention_has_a_cache(kind):
    model = from_config(longcat(**kind), "m")
    plan = cost.make(question(model, Layout(tp=8, dp=2, ep=True)))
    assert plan.token_bytes == 2 * LAYERS * 576 * 2
    assert "KV cache   64,512 bytes a token: 28 layers x 2 attentions x 1152" in report.as_text(
        plan
    )
    once = from_config(config(V3, num_hidden_layers=2 * LAYERS, num_attention_heads=64), "once")
    same = cost.make(question(once, Layout(tp=8, dp=2, ep=True)))
    assert plan.attention == same.attention


def test_weights_on_a_gpu():
    parts = weights(Layout(tp=8, ep=True), from_config(longcat(), "m"))
    assert parts == pytest.approx(
        {
            "attention": 2 * LAYERS * (SHARDED / 8 + REPLICATED + NORMS) * 2,
            "dense MLPs": 2 * LAYERS * DENSE / 8 * 2,
            "routed experts": LAYERS * 64 * EXPERT * 2,  # of the 512 that have weights
            "shared experts, routers": LAYERS * ROUTER * 4,
            "embeddings": 2 * 131072 * HIDDEN / 8 * 2,
        }
    )


def test_parts_that_are_not_quantised():
    fp8 = 1 + 4 / 128**2
    whole = from_config(longcat(quantization_config=FP8), "m")
    parts = weights(Layout(tp=8, ep=True), whole)
    assert parts["dense MLPs"] == pytest.approx(2 * LAYERS * DENSE / 8 * fp8)
    assert parts["absorbed W_UK, W_UV"] == 2 * LAYERS * KV_B / 8 * 2
    some = longcat(quantization_config=FP8, disable_quant_module=["self_attn", "mlps"])
    parts = weights(Layout(tp=8, ep=True), from_config(some, "m"))
    assert parts["dense MLPs"] == 2 * LAYERS * DENSE / 8 * 2
    assert parts["routed experts"] == pytest.approx(LAYERS * 64 * EXPERT * fp8)
    assert "absorbed W_UK, W_UV" not in parts
    # Names in a checkpoint's list are those of its matrices.
    listed = FP8 | {"ignored_layers": [f"model.layers.0.mlps.1.{n}_proj" for n in ("gate", "up")]}
    parts = weights(Layout(tp=8, ep=True), from_config(longcat(quantization_config=listed), "m"))
    plain, rest = 2 / 3 * DENSE, (2 * LAYERS - 2 / 3) * DENSE
    assert parts["dense MLPs"] == pytest.approx((plain * 2 + rest * fp8) / 8)


@pytest.mark.parametrize("tp, what", [(3, "--tp to divide the 64"), (8, "slice dense MLPs")])
def test_layouts_that_vllm_refuses(tp, what):
    model = from_config(longcat(quantization_config=FP8, ffn_hidden_size=12288 - 128), "m")
    with pytest.raises(ValueError, match=what):
        Layout(tp=tp, ep=True).check(model)


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"num_layers": None}, "m: config.json lacks num_layers"),
        ({"architectures": ["Other"]}, "of model_type longcat_flash only, got None"),
        ({"ngram_vocab_size_ratio": 78}, "embeddings of several tokens, which the plan does not"),
        ({"index_topk": 2048}, "indexers of LongCat's attentions, which the plan does not count"),
        ({"disable_quant_module": "mlps"}, "a list as disable_quant_module, got 'mlps'"),
        ({"expert_ffn_hidden_size": None}, "m: config.json lacks expert_ffn_hidden_size"),
    ],
)
def test_configs_that_are_refused(changes, said):
    with pytest.raises(ValueError, match=said):
        from_config(longcat(**changes), "m")


@pytest.mark.parametrize("key", ["q_lora_rank", "n_routed_experts", "zero_expert_num"])
def test_a_key_for_which_vllm_takes_longcats_number_is_not_none(key):
    without = longcat()
    del without[key]
    with pytest.raises(ValueError, match=f"lacks {key}, for which vLLM takes that of the maker's"):
        from_config(without, "m")
    assert LongcatFlashConfig().to_dict()[key]
