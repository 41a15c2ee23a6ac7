# SPDX-License-Identifier: Apache-2.0
"""Tokens and logprobs of whole engines against transformers' own models."""

import pytest
from mla_serving.demo_model import make_demo_model

pytestmark = pytest.mark.engine

FAMILIES = ("v2-lite", "v3", "v3-default-rope")


# Two workers, which share out the heads; vLLM would bind each to a NUMA node of its own.
TWO_RANKS = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module", params=FAMILIES)
def fp32(request, run_engine, scenarios, demo_checkpoint):
    """(checkpoint, result) of an fp32 engine; v2-lite tensor-parallel, v3 with every step
    checked."""
    checkpoint, engine = demo_checkpoint(request.param), {}
    if request.param == "v2-lite":
        engine = {"in_process": False, "tensor_parallel_size": 2, "env": TWO_RANKS}
    elif request.param == "v3":
        engine = {"env": {"MLA_BACKEND_CHECK": "1"}}
    result = run_engine(scenarios, model=checkpoint, **engine)
    return checkpoint, {**result, "checked": request.param == "v3"}


@pytest.mark.parametrize("scenario", ["plain", "churn", "prefix", "churn again"])
def test_fp32_matches_transformers(fp32, oracle, scenario):
    checkpoint, result = fp32
    outputs = result["scenarios"][scenario]["outputs"]
    agreed, differences = oracle(checkpoint, outputs)
    assert agreed == len(differences)
    assert len(differences) >= 128
    assert differences.max() < 1e-4


def test_every_attention_call_was_ours(fp32):
    result = fp32[1]
    layers = 4
    for scenario in result["scenarios"].values():
        before, after = scenario["before"], scenario["after"]
        done = {k: after[k] - before[k] for k in after if isinstance(after[k], int)}
        outputs = scenario["outputs"]
        prompts = sum(len(o["prompt"]) - o["cached"] for o in outputs)
        generated = sum(len(o["tokens"]) for o in outputs)
        # The last token of a request is never fed back.
        assert done["forward_mqa_tokens"] + done["forward_mha_tokens"] >= layers * (
            prompts + generated - len(outputs)
        )
        assert done["forward_mqa_calls"] == layers * done["decode_steps"] > 0
        assert done["forward_mha_calls"] == layers * done["prefill_steps"] > 0
        assert (done["checked_steps"] >= done["decode_steps"]) == result["checked"]
        assert after["decode"]["impl"] == "torch"
        assert "cpu" in after["decode"]["reason"]


def test_every_rank_computes_every_step(fp32):
    checkpoint, result = fp32
    ranks = result["ranks"]
    assert len(ranks) == (2 if checkpoint.name == "v2-lite" else 1)
    assert [rank["rank"] for rank in ranks] == list(range(len(ranks)))
    for count in ("decode_steps", "forward_mqa_tokens", "forward_mha_tokens", "kv_cache_writes"):
        assert len({rank[count] for rank in ranks}) == 1 and ranks[0][count] > 0


def test_chunked_prefill_and_prefix_caching_stay_on(fp32):
    result = fp32[1]
    assert result["chunked_prefill"] and result["prefix_caching"]
    assert result["block_size"] == 64
    plain = result["scenarios"]["plain"]
    # 497 prompt tokens in chunks of at most 128.
    assert plain["after"]["prefill_steps"] >= 4
    assert [o["cached"] for o in result["scenarios"]["prefix"]["outputs"]] == [256] * 4


def test_block_tables_were_not_in_order(fp32):
    checkpoint, result = fp32
    if checkpoint.name == "v2-lite":
        pytest.skip("its workers are other processes, which are not watched")
    assert result["scenarios"]["churn again"]["disordered"]


def test_rotary_fault_is_worked_around(fp32):
    assert "-rotary_embedding" in fp32[1]["custom_ops"]


def test_ends_of_prompts_in_absorbed_form(run_engine, scenarios, demo_checkpoint, oracle):
    """What is left behind a cached prefix joins decode tokens in one call; none of it expands."""
    checkpoint = demo_checkpoint("v3")
    plain = scenarios["plain"]
    shared, other = plain[3]["prompt"][:256], plain[2]["prompt"]
    ends = [
        {"prompt": shared + other[1 : 1 + n], "max_tokens": 32, "arrive": arrive}
        for n, arrive in ((9, 0), (2, 0), (30, 0), (31, 5), (17, 11))
    ]
    result = run_engine(
        {"plain": plain, "ends": ends},
        model=checkpoint,
        env={"MLA_BACKEND_EXTEND_TOKENS": "32", "MLA_BACKEND_CHECK": "1"},
    )
    outputs = result["scenarios"]["ends"]["outputs"]
    assert [o["cached"] for o in outputs] == [256] * 5
    agreed, differences = oracle(checkpoint, outputs)
    assert agreed == len(differences) == 5 * 32
    assert differences.max() < 1e-4
    before, after = (result["scenarios"]["ends"][when] for when in ("before", "after"))
    assert after["extend_steps"] - before["extend_steps"] == 3
    assert after["forward_mha_tokens"] == before["forward_mha_tokens"]


def test_a_draft_model_of_its_own(run_engine, scenarios, demo_checkpoint, oracle):
    """Its first step has a token more of each request than the model's, and is a decode step to it
    all the same."""
    checkpoint = demo_checkpoint("v2-lite")
    drafts = {"method": "draft_model", "model": str(checkpoint), "num_speculative_tokens": 3}
    result = run_engine(
        {"plain": scenarios["plain"]},
        model=checkpoint,
        env={"MLA_BACKEND_EXTEND_TOKENS": "0", "MLA_BACKEND_CHECK": "1"},
        speculative_config=drafts,
        disable_log_stats=False,
    )
    plain = result["scenarios"]["plain"]
    agreed, differences = oracle(checkpoint, plain["outputs"])
    assert agreed == len(differences) == 4 * 32
    assert differences.max() < 1e-4
    assert {1, 4, 5} <= set(plain["query_lens"])
    assert result["accepted"] == 1  # it is the model itself, in fp32


def test_weights_are_those_that_were_loaded_last(
    run_engine, scenarios, demo_checkpoint, oracle, tmp_path
):
    """Of other weights, also what is made of them: W_UK, W_UV and the experts' packed form."""
    other = make_demo_model("v3", tmp_path / "other", seed=1)
    plain = scenarios["plain"]
    result = run_engine(
        {"before": plain, "after": plain},
        model=demo_checkpoint("v3"),
        reload={"after": str(other)},
        enable_prefix_caching=False,  # pages of the old weights would be hit
    )
    agreed, differences = oracle(other, result["scenarios"]["after"]["outputs"])
    assert agreed == len(differences) == 128
    assert differences.max() < 1e-4
