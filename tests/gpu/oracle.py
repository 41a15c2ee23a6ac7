# SPDX-License-Identifier: Apache-2.0
"""transformers in fp32 as the judge of what an engine generated."""

import functools
from dataclasses import dataclass

import torch
from follow import following

DEVICE = "cuda"
# Of two means, or two 99th percentiles, over 1500 tokens or more that parted ways.
NOISE = 1.1


@functools.cache
def model(checkpoint):
    from transformers import AutoModelForCausalLM, logging

    logging.set_verbosity_error()  # it has no use for the draft layer's weights

    loaded = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    return loaded.eval().to(DEVICE)


@torch.no_grad()
def logprobs(checkpoint, prompt, generated):
    """Of every token of the vocabulary, at the place of each generated one: [n, vocab] fp32."""
    sequence = torch.tensor([prompt + generated], device=DEVICE)
    rows = model(checkpoint)(sequence).logits[0, len(prompt) - 1 : -1]
    return rows.float().log_softmax(-1)


@functools.lru_cache(maxsize=1024)
def kept(checkpoint, prompt, generated):
    return logprobs(checkpoint, list(prompt), list(generated)).cpu()


def logprobs_of(checkpoint, output):
    """`logprobs` of what an engine generated. Several tests look at the outputs of most engines, so
    the last ones are kept, on the CPU: 0.8 MB each."""
    return kept(checkpoint, tuple(output["prompt"]), tuple(output["tokens"]))


@dataclass
class Distance:
    """|logprob - oracle's logprob| over the tokens of all requests; `best`: tokens that are the
    oracle's own choice."""

    tokens: int
    best: int
    mean: float
    p99: float
    max: float


def logprobs_given(checkpoint, output, choices):
    """`logprobs` where each token reads those that an engine's indexers chose for it, and the gaps
    of these choices: see `Follow` in tests/backend/follow.py. Not kept: others chose otherwise."""
    with following(choices) as follow:
        return logprobs(checkpoint, output["prompt"], output["tokens"]), follow.gaps


def distance(checkpoint, outputs):
    return pooled((checkpoint, outputs))


def pooled(*of):
    """The distance over the tokens of several models: (checkpoint, outputs) of each."""
    all_outputs = [(path, output) for path, outputs in of for output in outputs]
    rows = (logprobs_of(path, output) for path, output in all_outputs)
    return distance_to(rows, [output for _, output in all_outputs])


def distance_to(logprobs_of_outputs, outputs):
    differences, best = [], 0
    for rows, output in zip(logprobs_of_outputs, outputs, strict=True):
        generated = torch.tensor(output["tokens"], device=rows.device)
        best += int((rows.argmax(-1) == generated).sum())
        theirs = rows.gather(1, generated[:, None])[:, 0]
        differences.append((torch.tensor(output["logprobs"], device=rows.device) - theirs).abs())
    d = torch.cat(differences)
    return Distance(len(d), best, float(d.mean()), float(d.quantile(0.99)), float(d.max()))


def divergences(checkpoint, ours, theirs):
    """Where two greedy outputs of a request first part: the oracle's logprob gap of the two tokens.

    One entry a request that parts; after that place the two answer different prompts.
    """
    gaps = []
    for a, b in zip(ours, theirs, strict=True):
        assert a["prompt"] == b["prompt"]
        pairs = enumerate(zip(a["tokens"], b["tokens"], strict=True))
        at = next((i for i, (x, y) in pairs if x != y), None)
        if at is not None:
            row = logprobs_of(checkpoint, a)[at]
            gaps.append(float((row[a["tokens"][at]] - row[b["tokens"][at]]).abs()))
    return gaps
