# SPDX-License-Identifier: Apache-2.0
"""Logprobs of named tokens do not reach an engine that drafts, which would end."""

from types import SimpleNamespace

import pytest
from mla_serving.server.named_logprobs import refuse_named_logprobs
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError


def make_engine(drafts, second_runner):
    config = SimpleNamespace(
        speculative_config=SimpleNamespace() if drafts else None, use_v2_model_runner=second_runner
    )
    return SimpleNamespace(vllm_config=config, generate=lambda *given, **named: (given, named))


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("second_runner", [False, True])
@pytest.mark.parametrize("tokens", [None, [5, 6]])
def test_named_logprobs_of_an_engine_that_drafts(drafts, second_runner, tokens):
    engine = make_engine(drafts, second_runner)
    refuse_named_logprobs(engine)
    params = SamplingParams(logprobs=1, logprob_token_ids=tokens)
    if drafts and not second_runner and tokens:
        with pytest.raises(VLLMValidationError, match="drafts tokens") as raised:
            engine.generate("prompt", params, "id")
        assert raised.value.parameter == "logprob_token_ids"
    else:
        assert engine.generate("prompt", params, "id", priority=1) == (
            ("prompt", params, "id"),
            {"priority": 1},
        )


def test_the_application_refuses_them(stand):
    s = stand(drafts=True)
    with pytest.raises(VLLMValidationError, match="logprob_token_ids"):
        s.engine.generate({}, SamplingParams(logprob_token_ids=[5]), "id")
