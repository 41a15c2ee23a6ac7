# SPDX-License-Identifier: Apache-2.0
"""The plan's bytes beside those that vLLM's own models have."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from mla_serving.demo_model import make_demo_model
from mla_serving.plan import cost
from mla_serving.plan.config import load
from mla_serving.plan.layout import GIB, Layout
from transformers import LongcatFlashConfig

from tests.serving.plan.plan_models import question

pytestmark = pytest.mark.engine

SCRIPT = Path(__file__).with_name("engine_bytes.py")
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}
LONGCAT = {
    "vocab_size": 2048, "hidden_size": 256, "num_layers": 2, "num_attention_heads": 4,
    "ffn_hidden_size": 512, "q_lora_rank": 96, "n_routed_experts": 4, "zero_expert_num": 2,
    "moe_topk": 2, "expert_ffn_hidden_size": 128, "max_position_embeddings": 1024,
}  # fmt: skip
OF_CHECKPOINTS = {
    "architectures": ["LongcatFlashForCausalLM"], "dtype": "bfloat16", "zero_expert_type":
    "identity", "routed_scaling_factor": 6.0, "mla_scale_q_lora": True, "mla_scale_kv_lora": True,
}  # fmt: skip


@pytest.fixture
def folder(request, tmp_path):
    """Of a demo model with an MTP layer, or with the config of a small LongCat-Flash."""
    longcat = request.param == "longcat"
    family = "v3" if longcat else request.param
    overrides = {"num_nextn_predict_layers": 1}
    path = make_demo_model(family, tmp_path / "model", overrides=overrides)
    if longcat:
        settings = LongcatFlashConfig(**LONGCAT).to_dict() | OF_CHECKPOINTS
        (path / "config.json").write_text(json.dumps(settings))
    return path


@pytest.mark.parametrize(
    "folder, drafts", [("v3", 2), ("v3.2", 1), ("v3", 0), ("longcat", 0)], indirect=["folder"]
)
def test_weights_and_cache_are_vllms(folder, drafts):
    given = {k: v for k, v in os.environ.items() if not k.startswith(("VLLM_", "MLA_"))}
    command = [sys.executable, str(SCRIPT), str(folder), str(drafts)]
    done = subprocess.run(
        command, env=given | ENVIRONMENT, capture_output=True, text=True, timeout=300, cwd="/"
    )
    assert done.returncode == 0, done.stderr[-4000:]
    engine = json.loads(done.stdout.splitlines()[-1])
    load_of = {"memory": 10 * GIB, "reserve": 0, "batch": 1, "rates": None, "drafts": drafts}
    plan = cost.make(question(load(str(folder)), Layout(tp=1), **load_of))
    assert plan.token_bytes == engine["token"]
    # The last norm, biases of routers in fp32 and scales of caches are left out.
    assert 0 <= engine["weights"] - plan.weight_bytes < 8192
