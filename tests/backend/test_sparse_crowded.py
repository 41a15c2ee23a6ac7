# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V3.2 on two workers (TP), with a cache that cannot hold the requests it has begun."""

import random

import pytest
from mla_serving.demo_model import make_demo_model

pytestmark = pytest.mark.engine

# vLLM would bind each worker to a NUMA node of its own.
TWO_RANKS = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}


def test_two_workers_preempt_and_answer_the_same(run_engine, oracle, tmp_path):
    rng = random.Random(0)
    requests = [
        {"prompt": [0, *rng.choices(range(3, 2048), k=n - 1)], "max_tokens": 48}
        for n in (50, 60, 120, 180, 250, 310, 370, 20)
    ]
    checkpoint = make_demo_model(
        "v3.2", tmp_path / "model", overrides={"index_topk": 2048, "num_hidden_layers": 2}
    )
    result = run_engine(
        {"crowd": requests},
        model=checkpoint,
        env={"MLA_BACKEND_CHECK": "1", **TWO_RANKS},
        in_process=False,
        tensor_parallel_size=2,
        num_gpu_blocks_override=18,  # one of `max_model_len` tokens fits, all of them need 31
        disable_log_stats=False,
    )
    assert result["preemptions"] > 0
    agreed, differences = oracle(checkpoint, result["scenarios"]["crowd"]["outputs"])
    assert agreed == len(differences) == 48 * len(requests)
    assert differences.max() < 1e-4
    assert [rank["rank"] for rank in result["ranks"]] == [0, 1]
    assert all(rank["checked_steps"] == rank["sparse_steps"] > 48 for rank in result["ranks"])
