# SPDX-License-Identifier: Apache-2.0
"""Lightning Indexer: scores, exact top-k and both in one, beside their peers, in one run.

    python benchmarks/sparse_indexer.py [--cases REGEX] [--results DIR]

Each of ours is checked first: scores against fp64 on sampled rows, top-k against a stable sort, the
fused form against the two steps. What fails is reported and not timed. Times are medians of
CUDA-graph replays with a cold L2. Peers need vLLM. Writes sparse_indexer.json to results/h200.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from arguments import pattern
from gpu import DEVICE, Timer, describe_gpu
from indexer_peers import Run, deepgemm_logits, topk_peers
from mla_kernels import exact_topk, indexer_scores, indexer_topk
from mla_kernels.indexer.reference import indexer_scores_reference
from mla_kernels.testing.indexer_case import IndexerCase
from outputs import claim, write_json

K = 2048
HEADS = 64
SHAPES = [(1, 131072), (1, 2**20), (8, 32768), (8, 131072), (64, 8192), (64, 32768), (64, 131072)]
TOPK_ONLY = [(256, 32768), (256, 131072)]


def make_case(B: int, n: int) -> IndexerCase:
    """B requests of n keys in a shuffled cache; keys and queries N(0, 1) in e4m3."""
    pages = n // 64
    cache = torch.empty(B * pages, 64 * 132, dtype=torch.uint8, device=DEVICE)
    for part in cache.split(8192):
        keys = torch.randn(len(part), 64 * 128, device=DEVICE).to(torch.float8_e4m3fn)
        part[:, : 64 * 128] = keys.view(torch.uint8)
        scales = torch.rand(len(part), 64, device=DEVICE) + 0.5
        part[:, 64 * 128 :] = scales.view(torch.uint8)
    table = torch.randperm(B * pages, device=DEVICE).int().view(B, pages)
    return IndexerCase(
        torch.randn(B, HEADS, 128, device=DEVICE).to(torch.float8_e4m3fn),
        cache.view(-1, 64, 132),
        torch.randn(B, HEADS, device=DEVICE),
        table,
        torch.full((B,), n, dtype=torch.int32, device=DEVICE),
    )


def score_error(case: IndexerCase, scores: torch.Tensor) -> float:
    """Relative Frobenius error of the first and the last row against fp64."""
    rows = [0, len(scores) - 1]
    want = indexer_scores_reference(
        case.q[rows], case.k_cache, case.weights[rows], case.block_table[rows], case.seq_lens[rows]
    )
    got = scores[rows].double()
    return float(torch.linalg.norm(got - want) / torch.linalg.norm(want))


def sorted_topk(scores: torch.Tensor) -> torch.Tensor:
    order = torch.sort(scores, dim=1, descending=True, stable=True).indices[:, :K]
    return order.sort(dim=1).values.int()


def rows_of(
    timer: Timer, case: str, op: str, runs: dict[str, Run], moved: int, extra: dict[str, Any]
) -> list[dict[str, Any]]:
    """Timed rows; a peer that does not run here is reported."""
    rows, working = [], {}
    for name, run in runs.items():
        try:
            run()
            torch.cuda.synchronize()
            working[name] = run
        except Exception as problem:
            rows.append({"case": case, "op": op, "impl": name, "failed": str(problem)[:200]})
    for name, us in timer.medians(working).items():
        row = {"case": case, "op": op, "impl": name, "us": round(us, 2)}
        rows.append({**row, "gbps": round(moved / us / 1e3, 1), **extra.get(name, {})})
    print(f"{case} {op}: " + " | ".join(f"{r['impl']} {r.get('us', r)}" for r in rows), flush=True)
    return rows


def wrong(case: str, op: str, impl: str, why: str) -> dict[str, Any]:
    """The row of what is not timed."""
    print(f"{case} {op}: WRONG, {impl}, {why}", flush=True)
    return {"case": case, "op": op, "impl": impl, "failed": why}


def bench_topk(timer: Timer, case: str, scores: torch.Tensor, lengths: torch.Tensor) -> list[Any]:
    out = torch.empty(len(scores), K, dtype=torch.int32, device=DEVICE)
    runs: dict[str, Run] = {}
    rows = []
    if torch.equal(exact_topk(scores, K, lengths=lengths), sorted_topk(scores)):
        runs["mla_kernels/triton"] = lambda: exact_topk(scores, K, lengths=lengths, out=out)
    else:
        rows.append(wrong(case, "topk", "mla_kernels/triton", "not the tokens of a stable sort"))
    runs |= topk_peers(scores, lengths, K)
    return rows + rows_of(timer, case, "topk", runs, scores.numel() * 4, {})


def bench(timer: Timer, B: int, n: int) -> list[dict[str, Any]]:
    name = f"b{B}x{n}"
    case = make_case(B, n)
    scores = torch.empty(B, n, device=DEVICE)
    runs: dict[str, Run] = {}
    extra: dict[str, Any] = {}
    rows = []
    for impl in ("triton", "hopper"):

        def run(impl: str = impl) -> torch.Tensor:
            return indexer_scores(*case.args, clean=False, out=scores, impl=impl)

        error = score_error(case, run())
        extra[f"mla_kernels/{impl}"] = {"rel_err": error}
        if error < 1e-5:
            runs[f"mla_kernels/{impl}"] = run
        else:
            why = f"relative error {error:.1e}, above 1e-5"
            rows.append(wrong(name, "scores", f"mla_kernels/{impl}", why))
    try:
        peer = deepgemm_logits(case)
        extra["deepgemm"] = {"rel_err": score_error(case, peer()[:, :n])}
        runs["deepgemm"] = peer
    except Exception as problem:
        print(f"{name} DeepGEMM: {problem}", flush=True)  # not installed, or refuses the case
    rows += rows_of(timer, name, "scores", runs, B * n * 132, extra)
    rows += bench_topk(timer, name, scores, case.seq_lens)

    def two_steps() -> torch.Tensor:
        indexer_scores(*case.args, clean=False, out=scores)
        return exact_topk(scores, K, lengths=case.seq_lens)

    fused: dict[str, Run] = {"mla_kernels/two steps": two_steps}
    if torch.equal(indexer_topk(*case.args, K), two_steps()):
        fused["mla_kernels/fused"] = lambda: indexer_topk(*case.args, K)
    else:
        rows.append(wrong(name, "scores+topk", "mla_kernels/fused", "not the two steps' tokens"))
    return rows + rows_of(timer, name, "scores+topk", fused, B * n * 132, {})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=pattern, default="", help="on the case names")
    results = Path(__file__).parent / "results" / "h200"
    parser.add_argument("--results", type=Path, default=results)
    args = parser.parse_args()
    claim(args.results)
    torch.backends.cuda.matmul.allow_tf32 = False
    machine = describe_gpu()
    print(json.dumps(machine), flush=True)
    timer, rows = Timer(), []
    for B, n in SHAPES:
        if args.cases.search(f"b{B}x{n}"):
            rows += bench(timer, B, n)
            torch.cuda.empty_cache()
    for B, n in TOPK_ONLY:
        if args.cases.search(f"b{B}x{n}"):
            scores = torch.randn(B, n, device=DEVICE)
            lengths = torch.full((B,), n, dtype=torch.int32, device=DEVICE)
            rows += bench_topk(timer, f"b{B}x{n}", scores, lengths)
    command = "python benchmarks/sparse_indexer.py " + " ".join(sys.argv[1:])
    report = {"machine": machine, "command": command.strip(), "rows": rows}
    write_json(args.results / "sparse_indexer.json", report)
    return 1 if any("failed" in row for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
