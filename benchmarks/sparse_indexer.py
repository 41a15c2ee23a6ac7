# SPDX-License-Identifier: Apache-2.0
"""Lightning Indexer: scores, exact top-k and both in one, beside their peers, in one run; and the
merge of what ranks chose that share out the tokens.

    python benchmarks/sparse_indexer.py [--cases REGEX] [--results DIR]

Each is checked first: scores against fp64 on sampled rows, top-k against a stable sort, ours by its
indices and a peer's by their scores, the fused form against the two steps. What fails is reported
and not timed. Times are medians of CUDA-graph replays with a cold L2. Peers need vLLM. Writes
sparse_indexer.json to results/h200 beside this file, and its rows to sparse.md, which is of
sparse.py too; of --cases, and while it runs, sparse_indexer_partial.json and .md of its own rows.
"""

import argparse
import json
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
from arguments import matching, pattern
from gpu import DEVICE, Timer, describe_gpu, need_gpu, without_vllm
from indexer_cases import (
    SHAPES,
    Batch,
    Golden,
    Shape,
    chooses_as_well,
    golden,
    make_batch,
    poison,
    score_error,
    sorted_topk,
)
from indexer_peers import Run, deepgemm_logits, topk_peers
from mla_kernels import exact_topk, indexer_scores, indexer_topk, merge_topk
from mla_kernels.dispatch import choose_impl
from mla_kernels.indexer.hopper.launcher import refusal
from outputs import claim, command
from partial import gather
from sparse_report import write_indexer_report

K = 2048
RANKS = 2  # that share out the tokens in `bench_merge`
# Relative error of scores: of exact products, and of those in fp8, which Hopper adds with 14 bits.
BAR, FP8_BAR = 1e-5, 2e-4
FP8 = "hopper/fp8_products"


def scorers(batch: Batch) -> dict[str, dict[str, Any]]:
    """The ways to the scores that a batch can take on this GPU, by name: their options."""
    q, why = batch.case.q, refusal(batch.case.q, batch.case.k_cache)
    try:
        choose_impl("indexer_scores", "hopper", q.device, available=("hopper",), hopper_refusal=why)
    except ValueError as error:
        print(f"{batch.shape.name}: {error}", flush=True)
        return {"triton": {"impl": "triton"}}
    return {name: {"impl": name} for name in ("triton", "hopper")} | {FP8: {"fp8_products": True}}


def rows_of(
    timer: Timer,
    case: str,
    op: str,
    runs: dict[str, Run],
    moved: int,
    flops: int = 0,
    extra: dict[str, dict[str, Any]] | None = None,
) -> list[dict[str, Any]]:
    """Timed rows; a peer that does not run here is reported. extra: more of a row, by its name."""
    rows, working = [], {}
    for name, run in runs.items():
        try:
            run()
            torch.cuda.synchronize()
            working[name] = run
        except Exception as problem:
            rows.append({"case": case, "op": op, "impl": name, "failed": failure(problem)})
    for name, us in timer.medians(working).items():
        row = {"case": case, "op": op, "impl": name, "us": round(us, 2)}
        row["gbps"] = round(moved / us / 1e3, 1)
        if flops:
            row["tflops"] = round(flops / us / 1e6, 1)
        rows.append({**row, **(extra or {}).get(name, {})})
    print(f"{case} {op}: " + " | ".join(f"{r['impl']} {r.get('us', r)}" for r in rows), flush=True)
    return rows


def failure(problem: Exception) -> str:
    """One line of the page; the log has all of it."""
    traceback.print_exception(problem)
    return f"{type(problem).__name__}: {' '.join(str(problem).split())}"[:200]


def wrong(case: str, op: str, impl: str, why: str) -> dict[str, Any]:
    """The row of what is not timed."""
    print(f"{case} {op}: WRONG, {impl}, {why}", flush=True)
    return {"case": case, "op": op, "impl": impl, "failed": why}


def bench_topk(timer: Timer, batch: Batch, scores: torch.Tensor) -> list[dict[str, Any]]:
    name, lengths = batch.shape.name, batch.lengths
    out = torch.empty(len(scores), K, dtype=torch.int32, device=DEVICE)
    want = sorted_topk(scores, lengths, K)
    runs: dict[str, Run] = {}
    rows = []
    if torch.equal(exact_topk(scores, K, lengths=lengths), want):
        runs["mla_kernels/triton"] = lambda: exact_topk(scores, K, lengths=lengths, out=out)
    else:
        rows.append(wrong(name, "topk", "mla_kernels/triton", "not the tokens of a stable sort"))
    for peer, run in topk_peers(scores, lengths, K, prefill=batch.shape.prefill).items():
        try:
            right = chooses_as_well(run(), want, scores, lengths)
        except Exception as problem:
            rows.append(wrong(name, "topk", peer, failure(problem)))
            continue
        if right:
            runs[peer] = run
        else:
            rows.append(wrong(name, "topk", peer, "not the scores of a stable sort"))
    return rows + rows_of(timer, name, "topk", runs, 4 * int(lengths.sum()))


def bench_merge(timer: Timer, batch: Batch, scores: torch.Tensor) -> list[dict[str, Any]]:
    """What RANKS ranks chose of every so many of the tokens, merged, as one of them does it."""
    name, op, lengths = batch.shape.name, f"merge of {RANKS} ranks", batch.lengths
    candidates = torch.empty(RANKS, len(scores), 2, K, dtype=torch.int32, device=DEVICE)
    for rank in range(RANKS):
        own = scores[:, rank::RANKS].contiguous()
        seen = (lengths + (RANKS - 1 - rank)) // RANKS
        chosen = exact_topk(own, K, lengths=seen)
        values = own.gather(1, chosen.clamp(0, own.shape[1] - 1).long())
        candidates[rank] = torch.stack([chosen, values.view(torch.int32)], 1)
    shares = [merge_topk(candidates, rank) for rank in range(RANKS)]
    places = [torch.where(s < 0, scores.shape[1], s * RANKS + r) for r, s in enumerate(shares)]
    together = torch.cat(places, 1).sort(1).values[:, :K]
    if not torch.equal(
        torch.where(together == scores.shape[1], -1, together), sorted_topk(scores, lengths, K)
    ):
        return [wrong(name, op, "mla_kernels/triton", "not the tokens of a stable sort")]
    out = torch.empty_like(shares[0])
    runs: dict[str, Run] = {"mla_kernels/triton": lambda: merge_topk(candidates, 0, out=out)}
    return rows_of(timer, name, op, runs, candidates.nbytes + out.nbytes)


def bench(timer: Timer, shape: Shape) -> list[dict[str, Any]]:
    batch = make_batch(shape)
    right = golden(batch)
    scores = torch.full((shape.rows, shape.keys), -torch.inf, device=DEVICE)
    rows = bench_scores(timer, batch, right, scores)
    if shape.cache == "fp8":  # the top-k is the same behind any cache
        rows += bench_topk(timer, batch, scores) + bench_merge(timer, batch, scores)
    return rows + bench_both(timer, batch, right, scores)


def bench_scores(
    timer: Timer, batch: Batch, right: Golden, scores: torch.Tensor
) -> list[dict[str, Any]]:
    """The scores alone; they are in `scores` then."""
    name, shape = batch.shape.name, batch.shape
    runs: dict[str, Run] = {}
    extra: dict[str, dict[str, Any]] = {}
    rows = []
    for impl, chosen in scorers(batch).items():

        def run(chosen: dict[str, Any] = chosen) -> torch.Tensor:
            return indexer_scores(*batch.args, **batch.options, clean=False, out=scores, **chosen)

        poison(scores, batch.lengths)
        error, bar = score_error(run(), *right), FP8_BAR if impl == FP8 else BAR
        extra[f"mla_kernels/{impl}"] = {"rel_err": error}
        if error < bar:
            runs[f"mla_kernels/{impl}"] = run
        else:
            why = f"relative error {error:.1e}, above {bar:.0e}"
            rows.append(wrong(name, "scores", f"mla_kernels/{impl}", why))
    try:
        if peer := deepgemm_logits(batch):
            error = score_error(peer(), *right)
            extra["deepgemm"] = {"rel_err": error}
            if error < FP8_BAR:
                runs["deepgemm"] = peer
            else:
                why = f"relative error {error:.1e}, above {FP8_BAR:.0e}"
                rows.append(wrong(name, "scores", "deepgemm", why))
    except Exception as problem:
        if not without_vllm(problem):
            rows.append(wrong(name, "scores", "deepgemm", failure(problem)))
    return rows + rows_of(timer, name, "scores", runs, shape.bytes, shape.flops, extra)


def bench_both(
    timer: Timer, batch: Batch, right: Golden, scores: torch.Tensor
) -> list[dict[str, Any]]:
    """Scores and top-k, as two steps and as one function; on Hopper in fp8 too, as vLLM has it."""
    name, shape = batch.shape.name, batch.shape
    rows = []
    both: dict[str, Run] = {}
    for suffix, bar in {"": BAR, f"/{FP8.partition('/')[2]}": FP8_BAR}.items():
        if suffix and FP8 not in scorers(batch):
            continue
        options = {**batch.options, "fp8_products": bool(suffix)}

        def two_steps(options: dict[str, Any] = options) -> torch.Tensor:
            indexer_scores(*batch.args, **options, clean=False, out=scores)
            return exact_topk(scores, K, lengths=batch.lengths)

        def fused(options: dict[str, Any] = options) -> torch.Tensor:
            return indexer_topk(*batch.args, K, **options)

        poison(scores, batch.lengths)
        tokens = two_steps()
        sound = score_error(scores, *right) < bar
        sound = sound and torch.equal(tokens, sorted_topk(scores, batch.lengths, K))
        for impl, run, same in (
            (f"mla_kernels/two steps{suffix}", two_steps, True),
            (f"mla_kernels/fused{suffix}", fused, torch.equal(fused(), tokens)),
        ):
            if sound and same:
                both[impl] = run
            else:
                why = "not the two steps' tokens" if sound else "the two steps are wrong"
                rows.append(wrong(name, "scores+topk", impl, why))
    return rows + rows_of(timer, name, "scores+topk", both, shape.bytes, shape.flops)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=pattern, default="", help="on the case names")
    results = Path(__file__).parent / "results" / "h200"
    parser.add_argument("--results", type=Path, default=results)
    args = parser.parse_args(argv)
    names = matching("--cases", args.cases, (shape.name for shape in SHAPES))
    claim(args.results)
    need_gpu()
    torch.backends.cuda.matmul.allow_tf32 = False
    machine = describe_gpu()
    print(json.dumps(machine), flush=True)
    timer = Timer()

    def measure_case(shape: Shape) -> list[dict[str, Any]]:
        rows = bench(timer, shape)
        torch.cuda.empty_cache()
        return rows

    report = {"machine": machine, "command": command("sparse_indexer", argv)}
    some = bool(args.cases.pattern)
    cases = [shape for shape in SHAPES if shape.name in names]
    write = write_indexer_report
    rows = gather("sparse_indexer", report, cases, measure_case, write, args, some=some)
    return 1 if any("failed" in row for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
