# SPDX-License-Identifier: Apache-2.0
"""400 for logprobs of named tokens (`logprob_token_ids`, and what sets it, as /generative_scoring
does) where the engine drafts: vLLM's first model runner has no place for them there. It answers
500, or ends.
"""

from typing import Any

from vllm.exceptions import VLLMValidationError

_FIELD = "logprob_token_ids"
_TEXT = (
    f"Logprobs of named tokens ({_FIELD}, /generative_scoring) cannot be had of this server: it "
    "drafts tokens (--speculative-config), where vLLM's engine fails at them."
)


def refuse_named_logprobs(engine: Any) -> None:
    """Have `engine`, vLLM's client, raise VLLMValidationError for such a request, before the engine
    has it."""
    config = engine.vllm_config
    if config.speculative_config is None or config.use_v2_model_runner:
        return
    generate = engine.generate

    def refusing(prompt: Any, sampling_params: Any, *args: Any, **kwargs: Any) -> Any:
        if sampling_params.logprob_token_ids is not None:
            raise VLLMValidationError(_TEXT, parameter=_FIELD)
        return generate(prompt, sampling_params, *args, **kwargs)

    engine.generate = refusing
