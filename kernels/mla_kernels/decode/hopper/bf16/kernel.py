# SPDX-License-Identifier: Apache-2.0
"""The Hopper decode kernel for bf16 caches: one CTA is 64 query rows times one part of the plan.

    TMA ──> ring A [64 x 256] ──┬─────────────> WG1   O[:,   0:256] += P V    (loads ring A)
    TMA ──> ring B [64 x 256] ──┼──┬──────────> WG2   O[:, 256:512] += P V    (loads rings B, R)
    TMA ──> ring R [64 x  64] ──┼──┤             ▲
                                └──┴─> WG0  S = Q K^T, softmax ── P ──┘

    barrier      arrives                       waits          means
    full_a/b     TMA                           WG0            a tile of ring A / B and R has landed
    full_p_a/b   WG0                           WG1 / WG2      P(n) and its factors are published
    empty_p      WG1, WG2                      WG0            both have read P(n)
    full_q       WG0                           WG1, WG2       the query tile is in registers
    full_out     WG0                           WG1, WG2       1 / l of the segment is published
    empty_out    WG1, WG2                      WG0            both have read it

WG1 and WG2 never wait for a cache tile: P(n) exists only if WG0 saw tile n. A ring slot is free for
its next load when its PV is done, which is after its QK. WG2 starts PV(n) as soon as P(n) is there;
WG1 one QK later, so that its half of the work runs on the tensor cores under WG0's softmax.

WG0 tells what O is multiplied by in the order in which its lanes hold it; as long as no row's
reference moves, which is nearly always, its warps do not shuffle at all (../softmax.py).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from mla_kernels.decode.hopper.barriers import barriers
from mla_kernels.decode.hopper.bf16.scores import scores_warpgroup
from mla_kernels.decode.hopper.bf16.values import values_warpgroup
from mla_kernels.decode.hopper.layouts import BLOCK, HALF, ROPE, TILE, VECTOR
from mla_kernels.decode.hopper.segments import read_start


@gluon.jit(do_not_specialize=["table_stride", "num_rows", "num_heads", "s_q"])
def hopper_decode_kernel(
    q_desc,  # latent part [B, s_q * H, 512] bf16, boxes [1, 64, 256]
    q_rope_desc,  # rope part [B, s_q * H, 64] bf16, boxes [1, 64, 64]
    kv_desc,  # [num_blocks * 64, 576] bf16, boxes [64, 256]
    kv_rope_desc,  # the same, boxes [64, 64]
    table,  # [B, max_blocks] int32
    seq_lens,  # [B] int32
    parts,  # [parts, 8] int32: the plan
    requests,  # [B, 4] int32: the plan
    out,  # [B, s_q, H, 512] bf16; FULL: boxes [64, 256] of [B * s_q * H, 512]
    lse,  # [B, s_q, H] fp32
    part_acc,  # [slots, s_q * H, 512] fp32; FULL: boxes [64, 128] of [slots * s_q * H, 512]
    part_sums,  # [slots, s_q * H, 2] fp32: l, k
    scale_log2,
    table_stride,
    num_rows,  # s_q * H
    num_heads,
    s_q,
    SLOTS_A: gl.constexpr,
    SLOTS_B: gl.constexpr,  # ring R has as many
    SLOTS_P: gl.constexpr,
    WORKER_REGS: gl.constexpr,
    RESCALE: gl.constexpr,  # "pow2" or "amla"
    CAUSAL: gl.constexpr,
    CHUNKED: gl.constexpr,
    FULL: gl.constexpr,  # s_q * H a multiple of 64: TMA writes out and part_acc
    PEELED: gl.constexpr,  # a segment's last tile has code of its own
):
    start = read_start(parts)
    q_shared = gl.allocate_shared_memory(gl.bfloat16, [BLOCK, 128], TILE)
    ring_a = gl.allocate_shared_memory(gl.bfloat16, [SLOTS_A, BLOCK, HALF], TILE)
    ring_b = gl.allocate_shared_memory(gl.bfloat16, [SLOTS_B, BLOCK, HALF], TILE)
    ring_r = gl.allocate_shared_memory(gl.bfloat16, [SLOTS_B, BLOCK, ROPE], TILE)
    p_ring = gl.allocate_shared_memory(gl.bfloat16, [SLOTS_P, BLOCK, BLOCK], TILE)
    factors = gl.allocate_shared_memory(gl.float32, [SLOTS_P, 4 * BLOCK], VECTOR)
    inverse = gl.allocate_shared_memory(gl.float32, [BLOCK], VECTOR)
    full_a = barriers(SLOTS_A, 1)
    full_b = barriers(SLOTS_B, 1)
    full_p_a = barriers(SLOTS_P, 1)
    full_p_b = barriers(SLOTS_P, 1)
    empty_p = barriers(SLOTS_P, 2)
    full_q = barriers(1, 1).index(0)
    full_out = barriers(1, 1).index(0)
    empty_out = barriers(1, 2).index(0)
    fence_async_shared()
    gl.warp_specialize(
        [
            (scores_warpgroup, (
                start, requests, seq_lens, table, table_stride, lse, part_sums, scale_log2,
                q_shared, ring_a, ring_b, ring_r, full_a, full_b,
                p_ring, full_p_a, full_p_b, empty_p, full_q,
                factors, inverse, full_out, empty_out, num_rows, num_heads, s_q,
                SLOTS_A, SLOTS_B, SLOTS_P, RESCALE, CAUSAL, CHUNKED,
            )),
            (values_warpgroup, (
                out, part_acc, q_desc, q_rope_desc, kv_desc, kv_rope_desc, table, table_stride,
                start, requests, seq_lens, ring_a, full_a, ring_r,
                p_ring, full_p_a, empty_p, full_q, factors, inverse, full_out, empty_out,
                num_rows, 0, SLOTS_A, SLOTS_P, RESCALE, CHUNKED, FULL, PEELED,
            )),
            (values_warpgroup, (
                out, part_acc, q_desc, q_rope_desc, kv_desc, kv_rope_desc, table, table_stride,
                start, requests, seq_lens, ring_b, full_b, ring_r,
                p_ring, full_p_b, empty_p, full_q, factors, inverse, full_out, empty_out,
                num_rows, HALF, SLOTS_B, SLOTS_P, RESCALE, CHUNKED, FULL, PEELED,
            )),
        ],
        [4, 4],
        [WORKER_REGS, WORKER_REGS],
    )  # fmt: skip
