# SPDX-License-Identifier: Apache-2.0
"""First answers, computed before the server says that it is ready."""

import asyncio

import httpx
from starlette.types import ASGIApp

_PROMPT_TOKENS = 8
_NEW_TOKENS = 4


async def first_answers(
    app: ASGIApp, model: str, max_model_len: int, keys: list[str], engines: int
) -> str | None:
    """Ask each of `engines` behind `app` for a completion, so that no user pays for the first use
    of anything. All at once: data-parallel engines take their steps together.

    Returns what a refusal said, if there was one: what a user asks for may be answered all the
    same. Raises RuntimeError when the server fails to answer.
    """
    new_tokens = min(_NEW_TOKENS, max_model_len - 1)
    prompt = list(range(min(_PROMPT_TOKENS, max_model_len - new_tokens)))
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": new_tokens,
        "ignore_eos": True,
        # vLLM compiles a part of these at their first use, and answers nobody meanwhile. 0, the
        # chosen token's alone, is within any --max-logprobs.
        "logprobs": 0,
    }
    headers = {"Authorization": f"Bearer {keys[0]}"} if keys else {}
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(
        transport=transport, base_url="http://warm-up", timeout=None
    ) as client:
        places = [{"X-data-parallel-rank": str(i)} if engines > 1 else {} for i in range(engines)]
        answers = await asyncio.gather(
            *(
                client.post("/v1/completions", json=body, headers=headers | place)
                for place in places
            )
        )
    for answer in answers:
        if answer.is_server_error:
            raise RuntimeError(f"the first answer failed: {answer.text}")
    return next((answer.text for answer in answers if answer.is_error), None)
