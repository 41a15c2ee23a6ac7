# SPDX-License-Identifier: Apache-2.0
"""What moves logprobs in a soak's model: bf16 beside wrong tokens. soak.py's TOLERANCE rests on it.

    python benchmarks/soak_rounding.py [--prompts 5]

On a CPU, by transformers: the model of the H200's soak in bf16, and in fp32 with wrong tokens in
the prompt, both against fp32. Prints by how many nats the likeliest tokens' logprobs move.
"""

import argparse
import random
import tempfile
from pathlib import Path

import torch
from soak import make_model, parse_arguments
from soak_cases import FIRST_TOKEN, PROBE_TOKENS

HEADS = 128
MODEL = {"num_attention_heads": HEADS, "num_key_value_heads": HEADS, "hidden_size": 1024}
MODEL |= {"num_hidden_layers": 4, "first_k_dense_replace": 4}
PROMPT = 700


def show(what: str, moves: torch.Tensor) -> None:
    at = torch.quantile(moves, torch.tensor([0.5, 0.99])).tolist()
    print(
        f"{what}: {len(moves)} tokens, half {at[0]:.2f}, 99 of 100 {at[1]:.2f}, "
        f"largest {moves.max():.2f}"
    )


def main() -> int:
    from transformers import AutoModelForCausalLM

    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--prompts", type=int, default=5)
    args = parser.parse_args()
    soak = parse_arguments(["--max-model-len", "65536"])
    soak.overrides = MODEL
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        path = make_model(soak, Path(folder))
        exact, rounded = (
            AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
            for dtype in (torch.float32, torch.bfloat16)
        )

        def logprobs(tokens: list[int], model: torch.nn.Module = exact) -> torch.Tensor:
            logits: torch.Tensor = model(torch.tensor([tokens])).logits[0]
            return logits.float().log_softmax(-1)

        vocabulary = exact.config.vocab_size
        rounding = []
        for seed in range(args.prompts):
            rng = random.Random(seed)
            draw = [rng.randrange(FIRST_TOKEN, vocabulary) for _ in range(PROMPT + PROBE_TOKENS)]
            base = logprobs(draw)
            best = base.argmax(-1, keepdim=True)
            rounding.append((logprobs(draw, rounded) - base).gather(1, best)[:, 0].abs())
            for count, at in ((64, 0), (64, 320), (64, 640), (1, 0), (1, 320), (1, 690)):
                wrong = list(draw)
                wrong[at : at + count] = (
                    rng.randrange(FIRST_TOKEN, vocabulary) for _ in range(count)
                )
                moves = (logprobs(wrong) - base).gather(1, best)[-PROBE_TOKENS:, 0].abs()
                show(f"prompt {seed}, {count} wrong from {at}", moves)
        show("bf16", torch.cat(rounding))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
