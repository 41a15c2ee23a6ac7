# SPDX-License-Identifier: Apache-2.0
"""Tokens and logprobs of whole engines against transformers' own models."""

import pytest

pytestmark = pytest.mark.engine

FAMILIES = ("v2-lite", "v3", "v3-default-rope")


@pytest.fixture(scope="module", params=FAMILIES)
def fp32(request, run_engine, scenarios, demo_checkpoint):
    """(checkpoint, result) of an fp32 engine; v2-lite with workers in processes of their own, v3
    with every step checked."""
    checkpoint = demo_checkpoint(request.param)
    in_process = request.param != "v2-lite"
    env = {"MLA_BACKEND_CHECK": "1"} if request.param == "v3" else None
    result = run_engine(scenarios, model=checkpoint, in_process=in_process, env=env)
    return checkpoint, {**result, "checked": env is not None}


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
        pytest.skip("its worker is another process, which is not watched")
    assert result["scenarios"]["churn again"]["disordered"]


def test_rotary_fault_is_worked_around(fp32):
    assert "-rotary_embedding" in fp32[1]["custom_ops"]
