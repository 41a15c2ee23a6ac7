# SPDX-License-Identifier: Apache-2.0
"""Engines run as processes of their own, once a session each; transformers is the oracle."""

import contextlib
import functools
import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
ENGINE_RUN = (sys.executable, "-X", "faulthandler", HERE / "engine_run.py")
ENGINE_SECONDS = 480  # most take 20 to 60 where no other process wants the cores
OFFLINE = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
VOCAB = 2048

# A small pool of pages and small prefill chunks: both run out within the scenarios.
ENGINE = {
    "attention_backend": "CUSTOM",
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 1024,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 128,
    "num_gpu_blocks_override": 80,
}


def tokens(rng, count):
    return [0, *(rng.randrange(3, VOCAB) for _ in range(count - 1))]


@pytest.fixture(scope="session")
def run_engine(tmp_path_factory):
    """`run_engine(scenarios, env=..., in_process=..., **engine keywords)` -> result dict."""

    def run(
        scenarios,
        *,
        env=None,
        in_process=True,
        ours=True,
        choices=False,
        spoil=None,
        reload=None,
        **engine,
    ):
        folder = tmp_path_factory.mktemp("engine")
        spec = {
            "engine": {**ENGINE, **engine},
            "scenarios": scenarios,
            "in_process": in_process,
            "ours": ours,
            "choices": choices,
            "spoil": spoil,
            "reload": reload,
        }
        if not ours:
            del spec["engine"]["attention_backend"]
        (folder / "spec.json").write_text(json.dumps(spec, default=str))
        environ = {
            **{k: v for k, v in os.environ.items() if not k.startswith(("VLLM_", "MLA_BACKEND_"))},
            **OFFLINE,
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0" if in_process else "1",
            **(env or {}),
        }
        with (folder / "log").open("w") as log:
            process = subprocess.Popen(
                [*ENGINE_RUN, folder / "spec.json", folder / "result.json"],
                cwd="/",  # nothing may depend on the working directory
                env=environ,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
            try:
                failed = process.wait(timeout=ENGINE_SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGABRT)  # every process writes its stacks to the log
                failed = f"after {ENGINE_SECONDS} s still running"
                with contextlib.suppress(subprocess.TimeoutExpired):  # the log says more than that
                    process.wait(timeout=30)
            finally:
                with contextlib.suppress(ProcessLookupError):  # workers, should it have died
                    os.killpg(process.pid, signal.SIGKILL)
        assert not failed, f"{failed}\n{(folder / 'log').read_text()[-8000:]}"
        return json.loads((folder / "result.json").read_text())

    return run


@pytest.fixture(scope="session")
def scenarios():
    """The requests every engine is given.

    plain: 4 x 32 tokens, prompts around page boundaries and longer than a prefill chunk.
    churn: 16 requests of mixed lengths that join and leave.
    prefix: prompts that repeat the first 256 tokens of one in `plain`.
    """
    rng = random.Random(0)
    plain = [{"prompt": tokens(rng, n), "max_tokens": 32} for n in (6, 64, 127, 300)]
    churn = [
        {
            "prompt": tokens(rng, rng.choice((1, 2, 30, 63, 65, 200, 401))),
            "max_tokens": rng.randrange(1, 40),
            "arrive": rng.randrange(0, 60),
        }
        for _ in range(16)
    ]
    shared = plain[3]["prompt"][:256]
    prefix = [{"prompt": shared + tokens(rng, n), "max_tokens": 32} for n in (1, 70, 200, 63)]
    return {"plain": plain, "churn": churn, "prefix": prefix, "churn again": churn}


@pytest.fixture(scope="session")
def oracle():
    """`oracle(checkpoint, outputs, model=None)`: transformers' fp32 logprobs of generated tokens,
    or those of `model`.

    Returns (agreed, differences): tokens that are transformers' own argmax given what came
    before, and |logprob - transformers' logprob| of every token.
    """
    from transformers import AutoModelForCausalLM

    @functools.cache
    def load(checkpoint):
        return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()

    def compare(checkpoint, outputs, model=None):
        model = model or load(checkpoint)
        agreed, differences = 0, []
        for output in outputs:
            start = len(output["prompt"])
            with torch.no_grad():
                sequence = torch.tensor([output["prompt"] + output["tokens"]])
                logprobs = model(sequence).logits[0].log_softmax(-1)
            generated = torch.tensor(output["tokens"])
            rows = logprobs[start - 1 : start - 1 + len(generated)]
            agreed += int((rows.argmax(-1) == generated).sum())
            theirs = rows.gather(1, generated[:, None])[:, 0]
            differences += (torch.tensor(output["logprobs"]) - theirs).abs().tolist()
        return agreed, torch.tensor(differences)

    return compare


@pytest.fixture(scope="session")
def llama(tmp_path_factory):
    """A model without MLA: its config.json, which is all that start-up reads before deciding."""
    folder = tmp_path_factory.mktemp("llama")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "vocab_size": 256,
        "max_position_embeddings": 512,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder
