# SPDX-License-Identifier: Apache-2.0
"""What a soak saw, and whether it is well: faults, leaks of blocks and memory, one line of it."""

import statistics
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

KEPT_FAULTS = 20
KEPT_PROBES = 20  # those that moved most
GROWTH_MIB = 64.0  # that memory may seem to grow by in the second half
GPU_LEAK_MIB = 16.0  # that tensors may take more when idle: workspaces made by the first use
MIN_SAMPLES = 8
TYPICAL = 0.25  # of the tolerance: by which half of a probe's tokens may move
MANY_TOKENS = 8  # fewer have no typical one
# A soak in which one of these never happened has not tried it.
OUTCOMES = {
    "done": "answered",
    "left": "left by the client",
    "refused": "bad and refused",
    "probes": "probes",
}
MEMORY = {"server_mib": "API server", "engine_mib": "engine", "gpu_mib": "GPU"}
Row = dict[str, Any]


@dataclass
class Ledger:
    """Counts of one soak. `samples` are rows of time_s, kv_cache_usage and what MEMORY names.

    moves         nats by which each token's logprob moved under load, of all probes
    widest_moves  of the probes that moved most: tokens of the prompt, and the moves
    """

    outcomes: Counter[str] = field(default_factory=Counter)
    samples: list[Row] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    fault_count: int = 0
    failed_requests: int = 0
    answer_tokens: int = 0
    prompt_tokens: int = 0
    longest_prompt: int = 0
    other_tokens: int = 0
    widest_gap: float = 0.0
    moves: list[float] = field(default_factory=list)
    widest_moves: list[tuple[int, list[float]]] = field(default_factory=list)

    def fault(self, text: str) -> None:
        """Something went wrong; the first KEPT_FAULTS are kept word for word."""
        self.fault_count += 1
        if len(self.faults) < KEPT_FAULTS:
            self.faults.append(text)

    def request_failed(self, text: str) -> None:
        """A fault that was a request's, which has no outcome then."""
        self.failed_requests += 1
        self.fault(text)

    def saw_prompt(self, tokens: int) -> None:
        self.prompt_tokens += tokens
        self.longest_prompt = max(self.longest_prompt, tokens)

    def saw_probe(self, length: int, moves: list[float], gap: float | None) -> None:
        """Tokens of the prompt, and what `soak_load.compare` returns."""
        self.moves += moves
        self.widest_moves.append((length, [round(x, 4) for x in moves]))
        self.widest_moves.sort(key=lambda seen: -max(seen[1], default=0.0))
        del self.widest_moves[KEPT_PROBES:]
        if gap is not None:
            self.other_tokens += 1
            self.widest_gap = max(self.widest_gap, gap)

    @property
    def requests(self) -> int:
        return sum(self.outcomes.values()) + self.failed_requests


@dataclass(frozen=True)
class End:
    """The server after the load: numbers that must be 0 in an idle, sound server, and others."""

    blocks_used: int
    requests_in_engine: int
    kv_cache_usage: float
    preemptions: int
    health: int
    tracebacks: int  # in the server's log
    corrupted: int | None  # requests with NaN logits, where vLLM was told to count them
    same_probes: bool  # idle at the begin and at the end, bit for bit
    # What tensors take on the GPU when idle, more than before the load; None where nobody says it.
    gpu_leak_mib: float | None = None


def moved_too_far(moves: list[float], gap: float | None, tolerance: float) -> str | None:
    """What of `soak_load.compare`'s result rounding does not explain, if anything.

    Rounding moves a token here and there; a wrong context moves nearly all behind it. So any token
    may move by `tolerance`, but half of them by no more than TYPICAL of it. Another token is right
    where the two were within twice the tolerance, as both may have moved.
    """
    drift = max(moves, default=0.0)
    if drift > tolerance:
        return f"a logprob moved by {drift:.3g}, token {moves.index(drift)} of {len(moves)} alike"
    if len(moves) >= MANY_TOKENS and statistics.median(moves) > TYPICAL * tolerance:
        return f"half of {len(moves)} logprobs moved by {statistics.median(moves):.3g}"
    if gap is not None and gap > 2 * tolerance:
        return f"another token that was {gap:.3g} below"
    return None


def growth_mib(samples: list[Row], name: str) -> float:
    """MiB by which `name`, which at least 4 of them have, grew over the second half of `samples`:
    twice what its floor rose by from the third to the last quarter. Steps take and give back memory
    above the floor all the time."""
    values = [row[name] for row in samples if name in row]
    half, quarter = len(values) // 2, len(values) // 4
    return 2 * (min(values[-quarter:]) - min(values[half:-quarter]))


def verdict(ledger: Ledger, end: End | None) -> list[str]:
    """All that is wrong; empty when the soak passed. `end` is None when the server does not say."""
    wrong = list(ledger.faults)
    if ledger.fault_count > len(wrong):
        wrong.append(f"and {ledger.fault_count - len(wrong)} more faults")
    wrong += [f"no request was {OUTCOMES[o]}" for o in OUTCOMES if not ledger.outcomes[o]]
    wrong += ["the server has no sound end state"] if end is None else _wrong_at_end(end)
    if len(ledger.samples) < MIN_SAMPLES:
        return [*wrong, f"{len(ledger.samples)} samples of memory tell nothing"]
    for name, label in MEMORY.items():
        # torch keeps GPU memory of long prompts for later ones: where tensors are counted, they are
        # what leaks.
        if name == "gpu_mib" and end is not None and end.gpu_leak_mib is not None:
            continue
        seen = sum(name in row for row in ledger.samples)
        if 0 < seen < MIN_SAMPLES:
            wrong.append(f"{seen} samples of memory of the {label} tell nothing")
        elif seen and (grown := growth_mib(ledger.samples, name)) > GROWTH_MIB:
            wrong.append(f"memory of the {label} grew by {grown:.0f} MiB in the second half")
    return wrong


def _wrong_at_end(end: End) -> list[str]:
    wrong = []
    if end.blocks_used or end.kv_cache_usage:
        wrong.append(
            f"{end.blocks_used} cache blocks leaked (usage {end.kv_cache_usage:.3f} when idle)"
        )
    if end.requests_in_engine:
        wrong.append(f"{end.requests_in_engine} requests are still in the engine")
    if end.preemptions == 0:
        wrong.append("no request was preempted: the cache is too large for this load")
    if end.health != 200:
        wrong.append(f"/health says {end.health}")
    if end.tracebacks:
        wrong.append(f"{end.tracebacks} tracebacks in the server's log")
    if end.corrupted:
        wrong.append(f"{end.corrupted} requests had NaN in their logits")
    if end.gpu_leak_mib is not None and end.gpu_leak_mib > GPU_LEAK_MIB:
        wrong.append(f"tensors take {end.gpu_leak_mib:.1f} MiB more of the GPU than before")
    if not end.same_probes:
        wrong.append("the idle server answers the probes otherwise than before the load")
    return wrong


def summary_line(minutes: float, ledger: Ledger, end: End | None, wrong: list[str]) -> str:
    """The soak in one line."""
    counts = ", ".join(f"{ledger.outcomes[o]} {OUTCOMES[o]}" for o in OUTCOMES)
    text = f"soak: {minutes:.1f} min, {ledger.requests} requests ({counts}), "
    sampled = ledger.samples[-1].get("preemptions", "?") if ledger.samples else "?"
    text += f"{end.preemptions if end else sampled} preemptions, "
    if wrong:
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        return f"{text}FAILED: {wrong[0]}{more}"
    return text + "no error, no leak, no NaN"
