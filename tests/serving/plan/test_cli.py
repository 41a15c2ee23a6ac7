# SPDX-License-Identifier: Apache-2.0
"""The command `mla-backend plan`: what it prints, and what it refuses."""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import huggingface_hub
import pytest
import yaml
from huggingface_hub.errors import LocalEntryNotFoundError, RemoteEntryNotFoundError
from mla_serving import cli
from mla_serving.plan import options

ROOT = Path(__file__).parents[3]
MODELS = ROOT / "configs" / "models"
SERVE = ROOT / "configs" / "serve"


def run(capsys, *argv):
    status = cli.main(["plan", *argv])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


V3 = ("--model", str(MODELS / "deepseek-v3-5-layers"))
V32 = ("--model", str(MODELS / "deepseek-v3.2-5-layers"))


def test_json(capsys):
    status, out, _ = run(capsys, *V3, "--gpus", "1", "--batch", "96", "--json")
    answer = json.loads(out)
    assert status == 0 and answer["load"]["fits"]
    assert answer["kv_cache"]["bytes_per_token"] == 5 * 1152
    assert answer["attention"]["kernels"]["attention"]["unmeasured"] is None
    assert answer["attention"]["source"] == "benchmarks/results/h200/dense_decode.json"


def test_text(capsys):
    status, out, _ = run(capsys, *V3, "--gpus", "1", "--batch", "96", "--context", "4096")
    assert status == 0
    assert "5,760 bytes a token: 5 layers x 1152, bfloat16" in out
    assert "as b96_h128_q1_k4096" in out
    status, out, _ = run(capsys, *V3, "--gpus", "8", "--batch", "1", "--context", "128")
    assert "our kernel 0.10 ms or less, as b1_" in out
    status, out, _ = run(capsys, *V3, "--gpus", "1", "--gpu", "b200", "--batch", "9999999")
    assert status == 1
    assert "fewer than the 9999999 of --batch" in out
    assert "nothing was measured on b200" in out
    status, out, _ = run(capsys, *V32, "--gpus", "8", "--batch", "1")
    said = "our attention 0.06 ms, as b1_h16_q1_32k_bf16, our indexer 0.11 ms or less, as b1x131072"
    assert status == 0 and f"{said}, together 0.17 ms or less; rates of " in out


@pytest.mark.parametrize(
    "model, gpu, last",
    [(V32, "a100", "0.28"), (V32, "b200", "0.32"), (V32, "h200", None), (V3, "b200", None)],
)
def test_the_last_vllm_that_serves_the_model_there_is_said(capsys, model, gpu, last):
    asked = (*model, "--gpus", "8", "--gpu", gpu)
    said = f"DCP 1; sparse attention there with vLLM up to {last}\n" if last else "DCP 1\n"
    assert said in run(capsys, *asked)[1]
    assert json.loads(run(capsys, *asked, "--json")[1])["cluster"]["last_vllm"] == last


@pytest.mark.parametrize(
    "argv, said",
    [
        (["--gpus", "8", "--tp", "3"], "--tp x --dp x --pp = --gpus, got 3 x 1 x 1 and 8"),
        (["--gpus", "6"], "--tp to divide the 128 attention heads, got 6"),
        (["--gpus", "8", "--dcp", "3"], "--dcp to divide --tp 8, got 3"),
        (["--gpus", "8", "--pp", "8"], "--pp up to 5 (layers), got 8"),
        (["--gpus", "512", "--tp", "8", "--dp", "64", "--expert-parallel"], "at most 256 GPUs"),
        (["--gpus", "1", "--gpu", "l40s"], "do not fit: 49.6 GiB a GPU"),
        (["--gpus", "1", "--gpu", "tpu"], "Expected --gpu in a100-40, a100,"),
        (["--gpus", "1", "--gpu-memory-utilization", "1.5"], "above 0 and up to 1, got 1.5"),
        (["--gpus", "1", "--gpu-memory-utilization", "nan"], "above 0 and up to 1, got nan"),
        (
            ["--gpus", "1", "--gpu-memory-gib", "nan"],
            "--gpu-memory-gib above 0 and up to 1000000, got nan",
        ),
        (["--gpus", "1", "--gpu-memory-gib", "1e300"], "above 0 and up to 1000000, got 1e+300"),
        (["--gpus", "1", "--gpu-memory-gib", "1000001"], "above 0 and up to 1000000, got 1000001"),
        (["--model", "", "--gpus", "1"], "--model is empty"),
        (["--gpus", "1", "--reserve-gib", "-1"], "--reserve-gib of 0 to 1000000, got -1"),
        (["--gpus", "1", "--reserve-gib", "nan"], "--reserve-gib of 0 to 1000000, got nan"),
        (["--gpus", "1", "--weight-bits", "0"], "--weight-bits above 0 and up to 32, got 0"),
        (["--gpus", "1", "--weight-bits", "nan"], "--weight-bits above 0 and up to 32, got nan"),
        (["--gpus", "1", "--reserve-gib", "1e300"], "of 0 to 1000000, got 1e+300"),
        (["--gpus", "1", "--model", "/no/such"], "/no/such: no such file"),
        (["--gpus", "1", "--model", str(ROOT / "Makefile")], "is not JSON"),
        (["--gpus", "1", "--model", str(MODELS)], "configs/models: a directory without config"),
        ([*V32, "--gpus", "16", "--tp", "16", "--dcp", "16"], "--dcp up to 8 for the sparse"),
    ],
)
def test_errors(capsys, argv, said):
    status, out, err = run(capsys, *V3, *argv)
    assert status == 1 and out == ""
    assert err.startswith("mla-backend plan: ") and said in err


# Of the size of Mistral Large 3.
MISTRAL = {
    "dim": 7168, "n_layers": 61, "hidden_dim": 16384, "n_heads": 128, "n_kv_heads": 128,
    "vocab_size": 131072, "max_position_embeddings": 294912, "q_lora_rank": 1536,
    "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "kv_lora_rank": 512, "v_head_dim": 128,
    "quantization": {"qformat_weight": "fp8_e4m3", "qscheme_act": "TENSOR"},
    "moe": {
        "route_every_n": 1, "first_k_dense_replace": 3, "num_experts": 128,
        "num_experts_per_tok": 4, "expert_hidden_dim": 4096, "num_shared_experts": 1,
    },
    "llama_4_scaling": {"original_max_position_embeddings": 8192, "beta": 0.1},
}  # fmt: skip


def test_mistrals_format(capsys, tmp_path, monkeypatch):
    file = tmp_path / "params.json"
    vision = {"vision_encoder": {"hidden_size": 1664, "num_hidden_layers": 48}}
    for model, more in ((tmp_path, {}), (file, vision), ("org/name", vision)):
        file.write_text(json.dumps(MISTRAL | more))

        def download(model, name, **_):
            if name != "params.json":
                raise RemoteEntryNotFoundError("not there", response=Mock())
            return str(file)

        monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
        status, out, err = run(capsys, "--model", str(model), "--gpus", "8", "--tp", "8")
        assert status == 0, err
        assert "673.4 B parameters, 61 layers, 128 heads, 128 experts" in out
        assert "linear layers in 8 bits, all of them" in out


def test_a_hub_that_does_not_answer_is_asked_once(capsys, monkeypatch):
    """It takes 24 s to say so."""
    asked = []
    monkeypatch.setattr("mla_serving.plan.checkpoint.unreachable", lambda *_: None)

    def download(model, name):
        asked.append(name)
        raise LocalEntryNotFoundError("no connection")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    status, _, err = run(capsys, "--model", "org/name", "--gpus", "8")
    assert status == 1 and "its config.json did not come" in err and "(no connection)" in err
    assert asked == ["config.json"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"kv_lora_rank": None}, "does not use multi-head latent attention"),
        ({"llama_4_scaling": {}}, "vLLM finds no config in Mistral's format (AssertionE"),
        ({"quantization": {"bits": 3}}, "vLLM finds no config in Mistral's format (ValueError: Fo"),
    ],
)
def test_what_is_no_mla_model_of_mistrals_format(capsys, tmp_path, change, said):
    (tmp_path / "params.json").write_text(json.dumps(MISTRAL | change))
    status, out, err = run(capsys, "--model", str(tmp_path), "--gpus", "8")
    assert (status, out) == (1, "")
    assert err.startswith("mla-backend plan: ") and said in err


def test_mistrals_format_takes_vllm(capsys, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm.transformers_utils.configs.mistral", None)
    (tmp_path / "params.json").write_text(json.dumps(MISTRAL))
    status, out, err = run(capsys, "--model", str(tmp_path), "--gpus", "8")
    assert (status, out) == (1, "")
    assert "in Mistral's format, which takes vLLM to read, and that cannot be imported" in err


@pytest.mark.parametrize(
    "argv, room",
    [
        ([], 0.9 * 143_771 * 2**20 - 6 * 2**30),
        (["--gpu-memory-gib", "200", "--gpu-memory-utilization", "0.8", "--reserve-gib", "10"],
         150 * 2**30),
    ],
)  # fmt: skip
def test_room_for_the_cache(capsys, argv, room):
    answer = json.loads(run(capsys, *V3, "--gpus", "1", *argv, "--json")[1])
    weights = sum(answer["weights"]["parts"].values())
    assert answer["kv_cache"]["bytes_per_gpu"] == pytest.approx(room - weights, rel=1e-9)


@pytest.mark.parametrize("dtype, row", [("bfloat16", 1152), ("fp8", 576), ("fp8_ds_mla", 656)])
def test_the_cache_asked_for(capsys, dtype, row):
    argv = (*V3, "--gpus", "1", "--kv-cache-dtype", dtype, "--json")
    cache = json.loads(run(capsys, *argv)[1])["kv_cache"]
    assert (cache["dtype"], cache["row_bytes"]) == (dtype, row)


def test_a_gpu_is_filled_as_the_profiles_do():
    """vLLM's own default is another, and may change."""
    parser = argparse.ArgumentParser()
    options.add(parser)
    key = "gpu-memory-utilization"
    profiles = [yaml.safe_load(path.read_text()) for path in SERVE.glob("*.yaml")]
    assert {p[key] for p in profiles if key in p} == {parser.get_default(key.replace("-", "_"))}
    assert "as in configs/serve" in " ".join(parser.format_help().split())


@pytest.mark.parametrize("option", ["--batch", "--context", "--gpus", "--pp"])
@pytest.mark.parametrize("value", ["0", "1000000001", f"{10**400}"])
def test_sizes_beyond_reason_are_refused(capsys, option, value):
    with pytest.raises(SystemExit, match="2"):
        run(capsys, *V3, "--gpus", "1", option, value)
    assert f"argument {option}: expected 1 to 1000000000, got {value}" in capsys.readouterr().err


def test_drafts_may_be_none(capsys):
    load = ("--gpus", "1", "--json", "--speculative-tokens")
    for count in (0, 3):
        status, out, _ = run(capsys, *V3, *load, f"{count}")
        assert status == 0 and json.loads(out)["load"]["speculative_tokens"] == count
    with pytest.raises(SystemExit, match="2"):
        run(capsys, *V3, *load, "-1")
    assert "--speculative-tokens: expected 0 to 1000000000, got -1" in capsys.readouterr().err


def test_bits_of_a_weight_need_not_be_whole(capsys):
    argv = (*V3, "--gpus", "1", "--weight-bits", "4.5", "--json")
    answer = json.loads(run(capsys, *argv)[1])
    experts = 2 * 256 * 3 * 7168 * 2048  # of the two MoE layers
    assert answer["weights"]["parts"]["routed experts"] == experts * 4.5 / 8


@pytest.mark.parametrize(("context", "said"), [("163840", False), ("163841", True)])
def test_a_context_that_the_model_does_not_have_is_said(capsys, context, said):
    status, out, _ = run(capsys, *V3, "--gpus", "8", "--context", context)
    assert status == 0 and ("beyond the model's 163,840" in out) is said


@pytest.mark.parametrize("endpoint", ["hf-mirror.invalid", "http://"])
def test_a_wrong_address_of_the_hub_is_a_sentence(endpoint, tmp_path):
    command = [sys.executable, "-m", "mla_serving.cli", "plan", "--gpus", "1", "--model", "a/b"]
    environ = {k: v for k, v in os.environ.items() if k != "HF_HUB_OFFLINE"}
    environ |= {"HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, env=environ)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    said = done.stderr.splitlines()[-1]
    assert said.startswith("mla-backend plan: a/b is no path here, and its config.json did not")
    assert said.endswith("Give the path of a config.json")
