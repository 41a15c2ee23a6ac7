# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters in whole engines: right where attention sees them, refused where it would not."""

import json

import pytest
import torch
from mla_serving.demo_model import make_demo_model
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.engine

RANK = 8
LORA = {"enable_lora": True, "max_loras": 1, "max_lora_rank": RANK}


@pytest.fixture(scope="module", params=["v3", "v3.2"])
def checkpoint(request, tmp_path_factory):
    """Without experts, beside which a CPU takes no adapters."""
    dense = {"first_k_dense_replace": 99, "n_routed_experts": 0}
    folder = tmp_path_factory.mktemp("dense") / "model"
    return make_demo_model(request.param, folder, overrides=dense)


def save_adapter(folder, checkpoint, projections):
    """A random adapter of those linear layers in `folder`, as large as their weights, and the model
    whose weights have it."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    random, tensors = torch.Generator().manual_seed(0), {}
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in projections:
            out, into = module.weight.shape
            a = torch.randn(RANK, into, generator=random) * into**-0.5
            b = torch.randn(out, RANK, generator=random) * (into / RANK) ** 0.5
            b *= module.weight.std()
            for half, weight in (("A", a), ("B", b)):
                tensors[f"base_model.model.{name}.lora_{half}.weight"] = weight
            module.weight.data += b @ a
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "bias": "none"}
    config |= {"target_modules": sorted(projections)}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return model


def adapted(requests, folder):
    return [request | {"adapter": str(folder)} for request in requests]


def test_adapters_of_the_projections_around_attention(
    run_engine, scenarios, oracle, checkpoint, tmp_path
):
    """Requests without one are the model's own, beside adapted ones and after them."""
    around = {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj", "down_proj"}
    model = save_adapter(tmp_path / "a", checkpoint, around)
    requests = {
        "without": scenarios["plain"],
        "with": adapted(scenarios["plain"], tmp_path / "a"),
        "after": scenarios["plain"],
        "both": scenarios["plain"][:2] + adapted(scenarios["plain"][2:], tmp_path / "a"),
    }
    result = run_engine(requests, model=checkpoint, **LORA)
    outputs = {name: run["outputs"] for name, run in result["scenarios"].items()}
    plain = outputs["without"] + outputs["after"] + outputs["both"][:2]
    for expected, of in ((None, plain), (model, outputs["with"] + outputs["both"][2:])):
        agreed, differences = oracle(checkpoint, of, expected)
        assert agreed == len(differences) == 32 * len(of)
        assert differences.max() < 1e-3


def test_an_adapter_of_what_is_absorbed_is_refused(run_engine, scenarios, checkpoint, tmp_path):
    """Its part of `kv_b_proj` would be left out without a word."""
    save_adapter(tmp_path / "a", checkpoint, {"kv_b_proj", "o_proj"})
    requests = {"with": adapted(scenarios["plain"], tmp_path / "a")}
    said = r"cannot serve the LoRA adapter .*layers\.0\.self_attn\.kv_b_proj \(one of 4\).*Mend: me"
    with pytest.raises(AssertionError, match=said):
        run_engine(requests, model=checkpoint, **LORA)
