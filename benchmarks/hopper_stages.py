# SPDX-License-Identifier: Apache-2.0
"""Clocks of the Hopper decode kernel's stages, each alone on an SM (docs/pipeline.md uses them).

    python benchmarks/hopper_stages.py [--results DIR]

[C1] is Q K^T of one 64 x 64 tile, [V1] softmax and the hand-over of P, [C2] P V of both halves of
the latent. The kernel's own functions run in a loop in one warpgroup; [V1] is the loop with it less
the loop without it, [C2] twice one half (the halves share the tensor cores). Writes
hopper_stages.json.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path

import torch
from gpu import DEVICE, describe_versions, need_gpu
from mla_kernels.decode.hopper.bf16.scores import issue_scores
from mla_kernels.decode.hopper.layouts import (
    BLOCK,
    HALF,
    OUTPUT,
    PASS_64,
    QUADS,
    QUERY,
    ROPE,
    SCORES,
    TILE,
    VECTOR,
)
from mla_kernels.decode.hopper.softmax import EXPONENT_FLOOR, publish_factors, softmax_step
from mla_kernels.triton_common.gluon_compat import cta_barrier
from outputs import claim, write_json
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

SCORES_ALONE, SCORES_SOFTMAX, VALUES = 0, 1, 2
LOOPS = 1024


@gluon.jit
def clock():
    return gl.inline_asm_elementwise(
        "mov.u64 $0, %clock64;", "=l", [], dtype=gl.int64, is_pure=False, pack=1
    )


@gluon.jit
def barrier():
    bar = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    mbarrier.init(bar.index(0), count=1)
    return bar


@gluon.jit
def random_tile(tile, COLUMNS: gl.constexpr):
    """Values in [-0.5, 0.5), so that the softmax sees finite scores."""
    row = gl.arange(0, BLOCK, gl.SliceLayout(1, PASS_64))
    for column in gl.static_range(0, COLUMNS, 64):
        col = column + gl.arange(0, 64, gl.SliceLayout(0, PASS_64))
        mixed = (row[:, None] * 7919 + col[None, :] * 104729) % 1009
        tile.slice(column, 64, dim=1).store((mixed.to(gl.float32) / 1009 - 0.5).to(gl.bfloat16))


@gluon.jit
def stage_kernel(clocks, sink, scale_log2, loops, STAGE: gl.constexpr):
    """clocks [programs] int64: from before the first to after the last of `loops` passes."""
    ring_a = gl.allocate_shared_memory(gl.bfloat16, [1, BLOCK, HALF], TILE)
    ring_b = gl.allocate_shared_memory(gl.bfloat16, [1, BLOCK, HALF], TILE)
    ring_r = gl.allocate_shared_memory(gl.bfloat16, [1, BLOCK, ROPE], TILE)
    q_shared = gl.allocate_shared_memory(gl.bfloat16, [BLOCK, 128], TILE)
    p_ring = gl.allocate_shared_memory(gl.bfloat16, [1, BLOCK, BLOCK], TILE)
    factors = gl.allocate_shared_memory(gl.float32, [1, 4 * BLOCK], VECTOR)
    loaded, taken, published = barrier(), barrier(), barrier()
    random_tile(ring_a.index(0), HALF)
    random_tile(ring_b.index(0), HALF)
    random_tile(ring_r.index(0), ROPE)
    random_tile(q_shared, 128)
    random_tile(p_ring.index(0), BLOCK)
    fence_async_shared()
    cta_barrier()
    # Waiting for the other phase of a barrier that nobody completes returns at once.
    if STAGE == 2:
        acc = gl.zeros([BLOCK, HALF], gl.float32, OUTPUT)
        begin = clock()
        for _ in range(loops):
            mbarrier.wait(loaded.index(0), 1)
            token = warpgroup_mma(p_ring.index(0), ring_a.index(0), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=(token,))
        end = clock()
        gl.store(sink, gl.sum(gl.sum(acc, 1), 0))
    else:
        q_a = ring_a.index(0).load(QUERY)
        q_b = ring_b.index(0).slice(0, 128, dim=1).load(QUERY)
        q_rope = ring_r.index(0).load(QUERY)
        k = gl.full([BLOCK, 4], EXPONENT_FLOOR, gl.float32, QUADS)
        l = gl.zeros([BLOCK, 4], gl.float32, QUADS)
        s = gl.zeros([BLOCK, BLOCK], gl.float32, SCORES)
        begin = clock()
        for _ in range(loops):
            token = issue_scores(
                q_a, q_b, q_rope, q_shared, ring_a, ring_b, ring_r, loaded, loaded, 0, 1, 0, 1
            )  # fmt: skip
            if STAGE == 1:
                mbarrier.wait(taken.index(0), 1)
            s = warpgroup_mma_wait(0, deps=(token,))
            if STAGE == 1:
                p, factor, k, l = softmax_step(s, k, l, scale_log2, "pow2")
                p_ring.index(0).store(p)
                publish_factors(factors.index(0), factor)
                fence_async_shared()
                mbarrier.arrive(published.index(0), count=1)
        end = clock()
        gl.store(sink, gl.sum(gl.sum(s, 1), 0) + gl.sum(gl.sum(l + k, 1), 0))
    gl.store(clocks + gl.program_id(0), end - begin)


def stage_clocks(stage: int, repeats: int = 5) -> float:
    """Clocks of one pass: the median over programs, one an SM, and repeats."""
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    clocks = torch.zeros(sms, dtype=torch.int64, device=DEVICE)
    sink = torch.zeros(1, device=DEVICE)
    found = []
    for _ in range(repeats):
        stage_kernel[(sms,)](clocks, sink, 0.06, LOOPS, STAGE=stage, num_warps=4)
        found += (clocks / LOOPS).tolist()
    if not torch.isfinite(sink).all():
        raise RuntimeError(f"stage {stage} computed {sink.item()}")
    return statistics.median(found)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results" / "h200")
    args = parser.parse_args()
    claim(args.results)
    need_gpu()
    if (capability := torch.cuda.get_device_capability()) != (9, 0):
        raise SystemExit(f"these are stages of the Hopper kernel, for sm_90; got {capability}")
    scores, both, half = (stage_clocks(s) for s in (SCORES_ALONE, SCORES_SOFTMAX, VALUES))
    stages = {"C1": round(scores), "V1": round(both - scores), "C2": round(2 * half)}
    report = {
        "machine": describe_versions(),
        "command": "python benchmarks/hopper_stages.py",
        "clocks": stages,
    }
    print(json.dumps(report))
    write_json(args.results / "hopper_stages.json", report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
