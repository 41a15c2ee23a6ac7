# SPDX-License-Identifier: Apache-2.0
"""Bits of a weight, and the layers that are not quantised, by `quantization_config`."""

import json
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError
from mla_serving.plan import cost, report
from mla_serving.plan.config import from_config, load
from mla_serving.plan.layout import GIB, Layout

CONFIG = Path(__file__).parents[3] / "configs/models/deepseek-v3-5-layers/config.json"
V3 = {**json.loads(CONFIG.read_text()), "num_hidden_layers": 61}
LAYERS = range(61)
NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True}


def packed(*groups, **changes):
    named = {f"group_{i}": group for i, group in enumerate(groups)}
    return {"quant_method": "compressed-tensors", "config_groups": named, **changes}


def group(bits, targets=("Linear",), **weights):
    return {"weights": {"num_bits": bits, **weights}, "targets": list(targets)}


INT4 = group(4, type="int", strategy="group", group_size=32, symmetric=True)


def model(quantisation, bits=None):
    return from_config({**V3, "quantization_config": quantisation}, "m", bits)


def plan(model, kv_cache_dtype):
    sizes = {"memory": 300 * GIB, "utilization": 0.9, "reserve": 0, "context": 1, "batch": 1}
    question = cost.Question(
        model, Layout(tp=8), "h200", rates=None, kv_cache_dtype=kv_cache_dtype, **sizes
    )
    return cost.make(question)


@pytest.mark.parametrize(
    "quantisation, bits",
    [
        ({"quant_method": "fp8"}, 8),  # one scale a tensor
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, 8 + 32 / 128**2),
        (NVFP4, 4.5),
        ({"quant_method": "modelopt", "quantization": {"quant_algo": "nvfp4"}}, 4.5),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, 8),
        ({"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}, 8),
        (NVFP4 | {"quant_algo": "W4A16_NVFP4"}, 4.5),
        ({"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"}, 8 + 32 / 128**2),
        ({"quant_method": "modelopt", "quant_algo": "MXFP8"}, 8.25),
        (AWQ, 4 + 20 / 128),
        (AWQ | {"zero_point": False}, 4 + 16 / 128),
        ({"quant_method": "awq", "w_bit": 4, "q_group_size": 64, "zero_point": True}, 4.3125),
        (GPTQ, 4 + 20 / 128),
        (GPTQ | {"group_size": -1, "bits": 8}, 8),
        (packed(INT4), 4.5),
        (packed(INT4, INT4), 4.5),
        (packed(group(4, type="int", group_size=128, symmetric=False)), 4 + 20 / 128),
        (packed(group(4, type="float", strategy="tensor_group", group_size=16)), 4.5),
        (packed(group(4, type="float", strategy="group", group_size=32)), 4.25),  # MXFP4
        (packed(group(8, type="float", strategy="channel")), 8),
        (packed(group(8, type="float", block_structure=[128, 128])), 8 + 32 / 128**2),
    ],
)
def test_bits_of_a_weight(quantisation, bits):
    assert model(quantisation).scheme.bits == bits
    assert model(quantisation, 6.5).scheme.bits == 6.5


def test_blocks_of_a_modelopt_release():
    assert model({"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"}).scheme.sides == (128, 128)
    assert model(NVFP4).scheme.sides == ()


@pytest.mark.parametrize(
    "quantisation, plain",
    [
        (NVFP4 | {"ignore": ["*self_attn*"]}, "attention"),
        (NVFP4 | {"ignore": ["self_attn"]}, "attention"),
        (NVFP4 | {"ignore": ["language_model.model.layers.*.self_attn.*"]}, "attention"),
        ({"quant_method": "modelopt", "quantization": {"quant_algo": "NVFP4", "exclude_modules": [
            f"model.layers.{i}.self_attn*" for i in range(61)]}}, "attention"),
        (NVFP4 | {"ignore": ["model.layers.*.mlp.experts"]}, "routed experts"),
        (AWQ | {"modules_to_not_convert": ["self_attn"]}, "attention"),
        (AWQ | {"modules_to_not_convert": [f"layers.{i}.mlp." for i in range(3)]}, "dense MLPs"),
        (GPTQ | {"dynamic": {r"-:.*\.self_attn\.": {}}}, "attention"),
        (GPTQ | {"modules_in_block_to_quantize": [["mlp"]]}, "attention"),
        (packed(INT4, ignore=["lm_head", "re:.*self_attn.*"]), "attention"),
        (packed(group(4, ["re:.*mlp.*"], type="int", group_size=32)), "attention"),
        *(({"quant_method": "fp8", key: [
            f"model.layers.{i}.mlp.{name}_proj" for i in range(3)
            for name in ("gate", "up", "down")]}, "dense MLPs")
            for key in ("ignored_layers", "modules_to_not_convert")),
    ],
)  # fmt: skip
def test_layers_that_are_not_quantised(quantisation, plain):
    layout = Layout(tp=8)
    whole = layout.weights(model(None), LAYERS)
    for bits in (None, 5):  # of its own, and of --weight-bits
        parts = layout.weights(model(quantisation, bits), LAYERS)
        parts.pop("absorbed W_UK, W_UV", None)
        assert {name for name in parts if parts[name] == whole[name]} == {plain, "embeddings"}


GATES = ("mlp.gate_proj", "mlp.up_proj", "mlp.shared_experts.up_proj")


@pytest.mark.parametrize(
    "quantisation, skipped",
    [
        # vLLM asks about gate_up_proj, and about all experts of a layer at once.
        (AWQ | {"modules_to_not_convert": ["gate"]}, GATES),
        (AWQ | {"modules_to_not_convert": ["mlp.gate."]}, ()),
        (AWQ | {"modules_to_not_convert": ["experts"]}, (
            "mlp.experts.0.gate_proj", "mlp.experts.0.down_proj", "mlp.shared_experts.up_proj")),
        (GPTQ | {"dynamic": {r"-:.*gate.*": {}}}, GATES),
        (GPTQ | {"dynamic": {r"-:.*mlp\.experts$": {}}}, (
            "mlp.experts.0.gate_proj", "mlp.experts.0.down_proj")),
        (GPTQ | {"modules_in_block_to_quantize": ["mlp"]}, ("self_attn.o_proj",)),
        # nor whether experts are among those that are quantised
        (GPTQ | {"modules_in_block_to_quantize": ["self_attn"]}, (*GATES, "mlp.down_proj")),
    ],
)  # fmt: skip
def test_names_that_vllm_asks_about(quantisation, skipped):
    asked = model(quantisation)
    names = ["self_attn.o_proj", *(f"mlp.{kind}_proj" for kind in ("gate", "up", "down"))]
    names += ["mlp.experts.0.gate_proj", "mlp.experts.0.down_proj", "mlp.shared_experts.up_proj"]
    plain = {name for name in names if not asked.quantised(0, name)}
    assert plain == set(skipped)


def test_awq_skips_what_it_skips_in_vllm():
    from vllm.model_executor.layers.quantization.utils.quant_utils import is_layer_skipped

    fused = {"gate_up_proj": ["gate_proj", "up_proj"]}
    for name in ("gate", "mlp.gate.", "experts", "self_attn", "down_proj", "layers.0."):
        asked, listed = model(AWQ | {"modules_to_not_convert": [name]}), [name]
        for ours, theirs in (
            ("mlp.gate_proj", "mlp.gate_up_proj"),
            ("mlp.up_proj", "mlp.gate_up_proj"),
            ("mlp.down_proj", "mlp.down_proj"),
            ("mlp.experts.0.gate_proj", "mlp.experts"),
            ("mlp.experts.0.down_proj", "mlp.experts"),
            ("self_attn.o_proj", "self_attn.o_proj"),
        ):
            path = f"model.layers.0.{theirs}"
            skips = is_layer_skipped(path, listed, fused, match_mode="substring")
            assert asked.quantised(0, ours) is not skips, (listed, ours)


INT4_64 = packed(group(4, type="int", group_size=64, symmetric=True))


@pytest.mark.parametrize("quantisation", [AWQ, GPTQ, INT4_64, NVFP4 | {"group_size": 64}])
@pytest.mark.parametrize(
    "change, tp, said",
    [
        ({"intermediate_size": 10944}, 2, "2 GPUs cannot slice dense MLPs of width 10944"),
        ({"moe_intermediate_size": 1408}, 4, "4 GPUs cannot slice shared experts of width 1408"),
        ({"v_head_dim": 96}, 128, "128 GPUs cannot slice the attention's output of width 12288"),
    ],
)
def test_groups_that_a_slice_would_cut(quantisation, change, tp, said):
    """vLLM refuses them where the input of a matrix is cut."""
    Layout(tp=8).check(model(quantisation))
    cut = from_config(V3 | change | {"quantization_config": quantisation}, "m")
    Layout(tp=1).check(cut)
    with pytest.raises(
        ValueError, match=rf"{said} in blocks of {cut.scheme.group}\. Mend: a lower"
    ):
        Layout(tp=tp).check(cut)
    Layout(tp=tp, ep=True).check(from_config(V3 | change, "m"))


@pytest.mark.parametrize(
    "quantisation, unit",
    [
        (packed(group(4, type="int", group_size=128, symmetric=True)), 128),
        ({"quant_method": "modelopt", "quant_algo": "MXFP8"}, 32),
        (AWQ, 32),  # which vLLM's kernel for any MoE takes instead
        (GPTQ | {"group_size": 64}, 32),
        (GPTQ | {"group_size": -1}, 1),
    ],
)
def test_groups_that_a_slice_of_experts_would_cut(quantisation, unit):
    widths = {"moe_intermediate_size": 8 * 192, "n_shared_experts": 0}
    fits = from_config(V3 | widths | {"quantization_config": quantisation}, "m")
    assert fits.block("mlp.experts.0.down_proj", [5]) == unit
    cut = from_config(
        V3 | widths | {"moe_intermediate_size": 8 * 176, "quantization_config": quantisation}, "m"
    )
    Layout(tp=8, ep=True).check(cut)
    if unit == 1:
        return Layout(tp=8).check(cut)
    with pytest.raises(ValueError, match=f"experts of width 1408 in blocks of {unit}. Mend: --ex"):
        Layout(tp=8).check(cut)


def test_an_older_name_of_the_quantisation(folder):
    """Which vLLM reads where the other is missing, of compressed-tensors."""
    for config in (V3, {"text_config": V3}):
        found = from_config(config | {"compression_config": packed(INT4)}, "m")
        assert found.scheme.bits == 4.5
    inner = V3 | {"compression_config": packed(INT4)}
    assert from_config({"text_config": inner}, "m").scheme.bits == 4.5
    assert load(str(folder(FILE, compression_config=packed(INT4)))).scheme.bits == 4.5


def test_an_nvfp4_release_with_plain_attention():
    plain = model(NVFP4 | {"ignore": ["*self_attn*"]})
    parts = Layout(tp=4).weights(plain, LAYERS)
    assert "absorbed W_UK, W_UV" not in parts  # views of a kv_b_proj that is not quantised
    assert sum(parts.values()) / GIB == pytest.approx(93.80, abs=0.01)


FLOAT8 = {"num_bits": 8, "type": "float", "dynamic": False}


@pytest.mark.parametrize(
    "quantisation, dtype",
    [
        (None, "bfloat16"),
        (NVFP4, "bfloat16"),
        (NVFP4 | {"kv_cache_quant_algo": "FP8"}, "fp8_e4m3"),
        (NVFP4 | {"kv_cache_scheme": FLOAT8}, "fp8_e4m3"),
        (NVFP4 | {"kv_cache_scheme": FLOAT8 | {"dynamic": True}}, "bfloat16"),
        (NVFP4 | {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}}, "fp8_e4m3"),
        (packed(INT4, kv_cache_scheme=FLOAT8), "bfloat16"),  # MLA's layers do not read it
    ],
)
def test_auto_is_the_cache_that_the_checkpoint_asks_for(quantisation, dtype):
    assert model(quantisation).kv_cache_dtype == dtype
    made = plan(model(quantisation), "auto")
    assert made.kv_cache_dtype == dtype and made.row_bytes == (576 if "fp8" in dtype else 1152)


@pytest.mark.parametrize(
    "quantisation, dtype",
    [
        ({"kv_cache_quant_algo": "FP8"}, "fp8_e4m3"),
        ({"quant_method": "modelopt_fp4", "kv_cache_quant_algo": "FP8"}, "fp8_e4m3"),
        ({"kv_cache_scheme": FLOAT8 | {"type": "int"}}, None),
        # Of what says different things a scheme goes first, then what stands further in.
        ({"kv_cache_scheme": FLOAT8, "kv_cache_quant_algo": "NVFP4"}, "fp8_e4m3"),
        (
            {
                "kv_cache_scheme": FLOAT8,
                "quantization": {"quant_algo": "NVFP4", "kv_cache_quant_algo": "NVFP4"},
            },
            "fp8_e4m3",
        ),
        (
            {
                "kv_cache_quant_algo": "NVFP4",
                "quantization": {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8"},
            },
            "fp8_e4m3",
        ),
        (packed(INT4, kv_cache_scheme=FLOAT8), None),
    ],
)
def test_auto_is_what_it_is_to_vllm(quantisation, dtype):
    from vllm.utils.torch_utils import get_kv_cache_quant_algo_string

    asks = NVFP4 | quantisation
    theirs = get_kv_cache_quant_algo_string(asks)
    assert (None if theirs == "auto" else theirs) == dtype
    assert model(asks).kv_cache_dtype == (dtype or "bfloat16")


def test_a_cache_that_our_kernels_do_not_read_is_refused():
    asked = model(NVFP4 | {"kv_cache_scheme": FLOAT8 | {"num_bits": 4}})
    with pytest.raises(ValueError, match=r"asks for a cache of nvfp4.*--kv-cache-dtype bfloat16"):
        plan(asked, "auto")
    assert plan(asked, "fp8").kv_cache_dtype == "fp8"


@pytest.mark.parametrize(
    "quantisation, said",
    [
        ({"quant_method": "quark"}, "quantised by quark, whose size config.json does not tell. "
         "Give --weight-bits"),
        ({"quant_method": ["fp8"]}, "--weight-bits"),
        ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}, "by modelopt.*--weight-b"),
        (GPTQ | {"dynamic": {r"+:.*mlp.*": {"bits": 8}}}, "quantised by gptq.*--weight-bits"),
        (packed(INT4, group(8, type="int")), "quantised by compressed-tensors.*--weight-bits"),
        (packed(group(4, ["MoELayer"], type="int", group_size=32)), "--weight-bits"),
        (packed(), "--weight-bits"),
        (packed(group(4, [])), "--weight-bits"),
    ],
)  # fmt: skip
def test_what_the_config_does_not_tell_is_asked_for(quantisation, said):
    with pytest.raises(ValueError, match=f"^m: weights .*{said}"):
        model(quantisation)
    assert model(quantisation, 4.5).scheme.bits == 4.5


@pytest.mark.parametrize(
    "quantisation, said",
    [
        (AWQ | {"group_size": "128"}, "group_size of 1 to 65536 .*, got '128'"),
        (AWQ | {"bits": 10**400}, "bits of 1 to 65536"),
        ({"quant_method": "fp8", "weight_block_size": [1, 65537]}, r"1 to 65536, got \[1, 65537\]"),
        (AWQ | {"modules_to_not_convert": "lm_head"}, "a list of layers .*, got 'lm_head'"),
        (packed(INT4 | {"targets": 5}), "a list of layers .*, got 5"),
        (packed(INT4, ignore=["re:("]), "in a pattern of quantization_config"),
        (packed(INT4) | {"config_groups": [1]}, r"a mapping as config_groups .*, got \[1\]"),
        ({"quant_method": "modelopt", "quantization": "NVFP4"}, "a mapping as quantization in"),
    ],
)
def test_quantisations_that_make_no_sense(quantisation, said):
    with pytest.raises(ValueError, match=f"^m: .*{said}"):
        model(quantisation)


@pytest.mark.parametrize(
    ("quantisation", "said"),
    [
        (None, "; linear layers in bfloat16"),
        (AWQ, "; linear layers in 4.156 bits, all of them"),
        (NVFP4 | {"ignore": ["*self_attn*"]}, "in 4.5 bits, but those that its config leaves out"),
    ],
)
def test_the_report_says_what_weights_were_taken_for(quantisation, said):
    """An AWQ config may name no layer that the checkpoint leaves as it is."""
    text = report.as_text(plan(model(quantisation), "auto"))
    assert said in text


# hf_quant_config.json as ModelOpt 0.29 writes it.
FILE = {
    "producer": {"name": "modelopt", "version": "0.29.0"},
    "quantization": {
        "quant_algo": "NVFP4",
        "kv_cache_quant_algo": "FP8",
        "group_size": 16,
        "exclude_modules": ["lm_head", *(f"model.layers.{i}.self_attn*" for i in range(61))],
    },
}


@pytest.fixture
def folder(tmp_path):
    """A checkpoint with these two files; without the second for None."""

    def make(beside, **changes):
        (tmp_path / "config.json").write_text(json.dumps(V3 | changes))
        if beside is not None:
            text = beside if isinstance(beside, str) else json.dumps(beside)
            (tmp_path / "hf_quant_config.json").write_text(text)
        return tmp_path

    return make


@pytest.mark.parametrize("named", ["", "config.json"])
def test_modelopts_file_beside_the_config_is_read(folder, named):
    read = load(str(folder(FILE) / named))
    assert read.scheme.bits == 4.5 and read.kv_cache_dtype == "fp8_e4m3"
    assert plan(read, "auto").row_bytes == 576
    parts, whole = (Layout(tp=8).weights(m, LAYERS) for m in (read, model(None)))
    assert {name for name in parts if parts[name] == whole[name]} == {"attention", "embeddings"}


def test_the_config_goes_before_the_file(folder):
    assert load(str(folder(FILE, quantization_config=AWQ))).scheme.bits == 4 + 20 / 128
    assert load(str(folder(FILE)), 6.5).scheme.bits == 6.5


def test_without_a_file_the_weights_are_plain(folder):
    assert load(str(folder(None))).scheme is None


def test_the_file_is_what_it_is_to_vllm(folder):
    from vllm.transformers_utils.config import get_config
    from vllm.utils.torch_utils import get_kv_cache_quant_algo_string

    place = folder(FILE, architectures=["DeepseekV3ForCausalLM"], model_type="deepseek_v3")
    found = get_config(str(place), trust_remote_code=False).quantization_config
    assert found == FILE
    named = found | {"quant_method": "modelopt_fp4"}  # which vLLM adds, by the producer
    assert get_kv_cache_quant_algo_string(named) == load(str(place)).kv_cache_dtype


@pytest.mark.parametrize(
    ("beside", "said"),
    [
        ("{", r"hf_quant_config\.json is not JSON"),
        ("[]", r"hf_quant_config\.json: expected a JSON object, got list"),
        ({"producer": {"name": "quark"}}, "--weight-bits"),
        (FILE | {"quantization": {"quant_algo": "W4A8"}}, "quantised by modelopt, .*--weight-bits"),
    ],
)
def test_a_file_that_makes_no_sense(folder, beside, said):
    with pytest.raises(ValueError, match=said):
        load(str(folder(beside)))


class DisconnectedError(Exception):
    """As those of the Hub's HTTP client, of which each of its versions has others."""


@pytest.mark.parametrize("missing", [LocalEntryNotFoundError, DisconnectedError])
def test_the_file_is_looked_for_on_the_hub(folder, monkeypatch, missing):
    place, asked = folder(FILE), []

    def download(model, name, **_):
        asked.append((model, name))
        if not (place / name).exists():
            raise missing("not there")
        return str(place / name)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    assert load("org/name").scheme.bits == 4.5
    assert asked == [("org/name", "config.json"), ("org/name", "hf_quant_config.json")]
    (place / "hf_quant_config.json").unlink()
    assert load("org/name").scheme is None
