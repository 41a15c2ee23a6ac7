# SPDX-License-Identifier: Apache-2.0
"""The demo checkpoints: the same bits every time, small, quick, complete and loadable."""

import errno
import hashlib
import json
import os
import resource
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from mla_serving.demo_model import FAMILIES, demo_model_path, make_demo_model
from safetensors.torch import load_file

FILES = {
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
}


def hashes(path):
    return {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in path.iterdir()}


def make_in_new_process(family, out, **env):
    code = "import sys; from mla_serving.demo_model import make_demo_model as m; m(*sys.argv[1:])"
    subprocess.run([sys.executable, "-c", code, family, str(out)], check=True, env=env)


@pytest.mark.parametrize("family", FAMILIES)
def test_same_bits_in_another_process(family, demo_checkpoint, tmp_path):
    before = os.times()
    make_in_new_process(family, tmp_path / "again", OMP_NUM_THREADS="1", PYTHONHASHSEED="7")
    after = os.times()
    # Of a processor, as other processes may want it too.
    seconds = after.children_user + after.children_system
    seconds -= before.children_user + before.children_system

    assert hashes(demo_checkpoint(family)).keys() == FILES
    assert hashes(tmp_path / "again") == hashes(demo_checkpoint(family))
    assert sum(f.stat().st_size for f in (tmp_path / "again").iterdir()) < 60e6
    assert seconds < 30


def test_weights_do_not_depend_on_machine_or_version(demo_checkpoint):
    """The hash of one tensor of each kind, written down: a change of the random stream shows."""
    weights = load_file(demo_checkpoint("v3") / "model.safetensors")
    digest = hashlib.sha256()
    for name in (
        "model.layers.3.self_attn.q_a_layernorm.weight",
        "model.layers.3.self_attn.kv_b_proj.weight",
        "model.layers.3.mlp.gate.e_score_correction_bias",
        "lm_head.weight",
    ):
        digest.update(weights[name].view(torch.uint8).numpy().tobytes())
    assert digest.hexdigest()[:16] == "558286ab35a01d1f"


def test_seed_and_overrides_change_the_model(demo_checkpoint, tmp_path):
    other = make_demo_model("v3", tmp_path / "m", seed=1, overrides={"num_hidden_layers": 2})
    weights = load_file(other / "model.safetensors")
    before = load_file(demo_checkpoint("v3") / "model.safetensors")
    assert {name.split(".")[2] for name in weights if "layers" in name} == {"0", "1"}
    assert not torch.equal(weights["lm_head.weight"], before["lm_head.weight"])
    assert json.loads((other / "config.json").read_text())["num_hidden_layers"] == 2


def test_every_weight_is_its_own(demo_checkpoint):
    """No two tensors share a stream, none is constant, and the end token's row is the longest."""
    weights = load_file(demo_checkpoint("v3") / "model.safetensors")
    firsts = [tuple(w.flatten()[:8].float().tolist()) for w in weights.values()]
    assert len(set(firsts)) == len(firsts)
    assert all(len(set(first)) > 4 for first in firsts)
    assert weights["lm_head.weight"].float().norm(dim=1).argmax() == 1


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("v2-lite", {"q_lora_rank": None, "scoring_func": "softmax", "topk_method": "greedy"}),
        ("v3", {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}),
        ("v3-default-rope", {"rope_scaling": None, "topk_method": "noaux_tc"}),
        ("v3.2", {"index_topk": 512, "index_n_heads": 8, "index_head_dim": 128}),
    ],
)
def test_config_has_the_keys_vllm_reads(family, expected, demo_checkpoint):
    config = json.loads((demo_checkpoint(family) / "config.json").read_text())
    assert expected.items() <= config.items()
    assert (config["kv_lora_rank"], config["qk_rope_head_dim"]) == (512, 64)
    if family != "v3-default-rope":
        rope = config["rope_scaling"]
        assert rope["type"] == "yarn"
        reach = rope["factor"] * rope["original_max_position_embeddings"]
        assert reach == config["max_position_embeddings"]


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_loads_every_weight(family, demo_checkpoint):
    transformers = pytest.importorskip("transformers")
    path = demo_checkpoint(family)
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, output_loading_info=True
    )
    assert not any(report.values()), report
    assert [type(model).__name__] == json.loads((path / "config.json").read_text())["architectures"]

    with torch.no_grad():
        best = model(torch.arange(200, 400)[None]).logits[0].topk(2).values
    lead = best[:, 0] - best[:, 1]
    assert lead.median() > 0.3 and lead.min() > 1e-3  # greedy tokens must not hang on rounding


def test_tokenizer_round_trip_and_chat_template(demo_checkpoint):
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(demo_checkpoint("v3"))
    config = json.loads((demo_checkpoint("v3") / "config.json").read_text())
    assert len(tokenizer) == config["vocab_size"]
    for name in ("bos", "eos", "pad"):
        assert getattr(tokenizer, f"{name}_token_id") == config[f"{name}_token_id"]

    text = "Zwölf Boxkämpfer\n\tdef f(x): return x ** 2  # 漢字 🙂"
    ids = tokenizer.encode(text)
    assert ids[0] == tokenizer.bos_token_id
    assert tokenizer.decode(ids, skip_special_tokens=True) == text

    chat = [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "Bye"},
    ]
    rendered = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert rendered == (
        "<|bos|><|system|>Be short.<|user|>Hi<|assistant|>Hello<|eos|><|user|>Bye<|assistant|>"
    )


def test_refusals(tmp_path):
    with pytest.raises(ValueError, match=r"'v9'.*v2-lite, v3, v3-default-rope, v3\.2"):
        make_demo_model("v9", tmp_path / "m")
    with pytest.raises(ValueError, match=r"no such key.*: hiden_size"):
        make_demo_model("v3", tmp_path / "m", overrides={"hiden_size": 1})
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "letter.txt").write_text("keep me")
    with pytest.raises(ValueError, match="not empty"):
        make_demo_model("v3", tmp_path / "full")
    assert [f.name for f in tmp_path.iterdir()] == ["full"]


def test_a_disk_that_is_full_is_named(tmp_path):
    """What a failed write says of itself names no file."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, limits[1]))
    try:
        with pytest.raises(OSError, match=f"{tmp_path}/m") as failed:
            make_demo_model("v3", tmp_path / "m")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert failed.value.errno == errno.EFBIG
    assert list((tmp_path / "m").iterdir()) == []
    make_demo_model("v3", tmp_path / "m")


def test_all_files_have_the_same_mode(demo_checkpoint):
    """Made by one user, for an image or a service of another: the umask alone decides."""
    assert len({f.stat().st_mode for f in demo_checkpoint("v3").iterdir()}) == 1


def test_cache_is_shared_and_follows_the_code(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    both_made = threading.Barrier(2, timeout=60)

    def make_and_wait(*args):
        made = make_demo_model(*args)
        both_made.wait()
        return made

    monkeypatch.setattr("mla_serving.demo_model.build.make_demo_model", make_and_wait)
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(demo_model_path, ["v3", "v3"])
    assert first == second
    assert first.parent == tmp_path / "mla-backend"
    assert [f.name for f in first.parent.iterdir()] == [first.name]  # no scratch left behind

    made = (first / "model.safetensors").stat().st_mtime_ns
    assert demo_model_path("v3") == first
    assert (first / "model.safetensors").stat().st_mtime_ns == made

    monkeypatch.setattr("mla_serving.demo_model.build.make_demo_model", make_demo_model)
    monkeypatch.setattr("mla_serving.demo_model.build._stamp", lambda: "0123456789ab")
    assert demo_model_path("v3") != first


def test_a_cached_model_that_lost_a_file_is_made_again(tmp_path, monkeypatch):
    """Cleaners of caches take what is large or old, file by file."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = demo_model_path("v3")
    files = {file.name: file.read_bytes() for file in path.iterdir()}
    assert files.keys() == FILES
    for name in FILES:
        (path / name).unlink()
        assert demo_model_path("v3") == path
        assert {file.name: file.read_bytes() for file in path.iterdir()} == files
    assert list(path.parent.iterdir()) == [path]
