# SPDX-License-Identifier: Apache-2.0
"""The files that a soak leaves, while it runs too."""

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from outputs import write, write_json
from partial import PARTIAL, take_away
from soak_ledger import (
    GPU_LEAK_MIB,
    GROWTH_MIB,
    MEMORY,
    MIN_SAMPLES,
    TYPICAL,
    End,
    Ledger,
    growth_mib,
    summary_line,
)

MINUTES = 30.0  # of a whole soak
UNFINISHED = "the soak did not come to its end"
Row = dict[str, Any]


@dataclass(frozen=True)
class Report:
    """soak.json and soak.md in `results`, of less than MINUTES soak_partial's; `about`: command,
    machine, model and settings."""

    results: Path
    about: Row

    def so_far(self, minutes: float, ledger: Ledger) -> None:
        """What is left if nothing is written after it."""
        self._write(minutes, ledger, None, [*ledger.faults, UNFINISHED], PARTIAL)
        self._log(PARTIAL).unlink(missing_ok=True)

    def write(self, minutes: float, ledger: Ledger, end: End | None, wrong: list[str]) -> str:
        """`wrong` as `verdict` gives it. Returns the soak in one line."""
        whole = minutes >= MINUTES
        line = self._write(minutes, ledger, end, wrong, "" if whole else PARTIAL)
        if whole:
            take_away(self.results, "soak")
        return line

    def keep_log(self, minutes: float, log: Path | None) -> None:
        """soak-server.log or soak_partial-server.log, as the results are named, if something was
        wrong: a copy of `log`. That of an earlier soak is taken away, as its results are."""
        for ending in ("", PARTIAL) if minutes >= MINUTES else (PARTIAL,):
            self._log(ending).unlink(missing_ok=True)
        if log:
            kept = self._log("" if minutes >= MINUTES else PARTIAL)
            kept.write_bytes(log.read_bytes())

    def _log(self, ending: str) -> Path:
        return self.results / f"soak{ending}-server.log"

    def _write(
        self, minutes: float, ledger: Ledger, end: End | None, wrong: list[str], ending: str
    ) -> str:
        line = summary_line(minutes, ledger, end, wrong)
        report = {
            "line": line,
            "wrong": wrong,
            **self.about,
            "counts": counts_of(ledger),
            "end": asdict(end) if end else None,
            "samples": ledger.samples,
        }
        write_json(self.results / f"soak{ending}.json", report)
        write(self.results / f"soak{ending}.md", markdown(report))
        return line


def yes_or_no(known: bool | None) -> str:
    return "?" if known is None else "yes" if known else "no"


def counts_of(ledger: Ledger) -> Row:
    """What the ledger counted, its long lists in few numbers."""
    kept = {k: v for k, v in vars(ledger).items() if k not in ("samples", "faults", "moves")}
    moves = sorted(ledger.moves) or [0.0]
    at = {"median": len(moves) // 2, "99 of 100": len(moves) * 99 // 100, "largest": -1}
    quantiles = {name: round(moves[i], 4) for name, i in at.items()}
    gap = ledger.widest_gap if math.isfinite(ledger.widest_gap) else None  # JSON has no inf
    return kept | {"widest_gap": gap, "moves": {"tokens": len(ledger.moves), **quantiles}}


def held(gap: float | None) -> str:
    if gap is None:
        return "of which one was not among the alternatives"
    return f"held at most {gap:.2g} nats below"


def moved(counts: Row) -> str:
    """How far probes moved; older results know the largest move alone."""
    if "moves" not in counts:
        return f"logprobs moved by at most {counts['widest_drift']:.2g} nats"
    moves = counts["moves"]
    return (
        f"the logprobs of {moves['tokens']} tokens moved by at most {moves['largest']:.2g} nats "
        f"(half of them by {moves['median']:.2g}, 99 of 100 by {moves['99 of 100']:.2g})"
    )


def markdown(report: Row) -> str:
    """The page of a report as soak.py writes it."""
    machine, settings, end = report["machine"], report["settings"], report["end"] or {}
    counts, samples = report["counts"], report["samples"]
    lines = [
        "# Soak",
        "",
        f"    {report['line']}",
        "",
        f"Written by `{report['command']}`. {machine.get('gpu', machine['cpu'])}, vLLM "
        f"{machine['vllm']}, torch {machine['torch']}, commit {machine.get('commit', 'unknown')}. "
        f"{report['model']}; {settings['dtype']}, "
        f"context {settings['max_model_len']}, {settings['blocks']} cache blocks of 64 tokens, "
        f"{settings['concurrency']} clients.",
        "",
        *(f"* WRONG: {text}" for text in report["wrong"]),
        *(f"* {text}" for text in report.get("notes", ())),
        f"* {counts['prompt_tokens']} prompt tokens, {counts['longest_prompt']} in the longest; "
        f"{counts['answer_tokens']} answer tokens checked.",
        f"* The cache was at most {max((row['kv_cache_usage'] for row in samples), default=0):.0%} "
        f"full; at the end {end.get('blocks_used', '?')} blocks are in use.",
        "* Probes are the same bit for bit on the idle server before and after: "
        f"{yes_or_no(end.get('same_probes'))}. Under load {moved(counts)}, and "
        f"{counts['other_tokens']} of "
        f"{counts['outcomes'].get('probes', 0)} answers had another token, "
        f"{held(counts['widest_gap'])}. Allowed: {settings['tolerance']:g} a token, "
        f"{TYPICAL:g} of that for half of a probe's tokens, twice for another one.",
        "",
        "| memory, MiB | begin | middle | end | most | growth in the second half |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for name, label in MEMORY.items():
        values = [row[name] for row in samples if name in row]
        if len(values) >= MIN_SAMPLES:
            marks = (values[0], values[len(values) // 2], values[-1], max(values))
            cells = " | ".join(f"{value:.0f}" for value in marks)
            lines.append(f"| {label} | {cells} | {growth_mib(samples, name):+.1f} |")
    if (leak := end.get("gpu_leak_mib")) is not None:
        lines += [
            "",
            f"Tensors on the idle GPU, against before the load: {leak:+.1f} MiB; more than "
            f"{GPU_LEAK_MIB:.0f} fails. The GPU's row is not judged: torch keeps memory of long "
            "prompts, and other processes have theirs.",
        ]
    lines += [
        "",
        "Growth: twice the rise of the least value from the third to the last quarter; more than "
        f"{GROWTH_MIB:.0f} MiB fails.",
    ]
    return "\n".join(lines) + "\n"
