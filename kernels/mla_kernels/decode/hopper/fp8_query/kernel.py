# SPDX-License-Identifier: Apache-2.0
"""The Hopper decode kernel for fp8 queries: one CTA is 64 query rows times one part of the plan.

    TMA ──> ring A [64 x 256 codes] ──┬──────> WG1   O^T[  0:256, :] += V^T P^T  (loads ring A)
    TMA ──> ring B [64 x 256 codes] ──┼─┬────> WG2   O^T[256:512, :] += V^T P^T  (loads ring B and
    TMA ──> rope ring [64 x 64]     ──┤ │       ▲                                 the rope ring)
    TMA ──> query [64 x 576]        ──┴─┴> WG0 ─┘ P  S = Q K^T, softmax          (loads the query)

Both products are fp8 wgmma. S = Q K^T takes codes as they land; P becomes e4m3 (softmax.py), V^T
passes through registers (operands.py). Neither the queries nor the cache are converted.

    barrier      arrives       waits         means
    full_q       TMA           WG0           the query tile has landed
    full_a/b     TMA           WG0; WG1/2    a half tile (b: and the rope columns) has landed
    full_p       WG0           WG1, WG2      P of a tile and its factors are published
    empty_p      WG1, WG2      WG0           both have read it
    full_out     WG0           WG1, WG2      1 / l of the segment is published
    empty_out    WG1, WG2      WG0           both have read it

A ring slot is free for its next load when its warpgroup has multiplied it: P of a tile exists only
if its scores are done. WG0 asks for the scores of the next tile before it turns to its softmax.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from mla_kernels.decode.hopper.barriers import barriers
from mla_kernels.decode.hopper.fp8_query.operands import LATENT_UNITS, ROPE_CODES, ROPE_UNITS
from mla_kernels.decode.hopper.fp8_query.scores import scores_warpgroup
from mla_kernels.decode.hopper.fp8_query.values import values_warpgroup
from mla_kernels.decode.hopper.layouts import BLOCK, VECTOR
from mla_kernels.decode.hopper.segments import read_start


@gluon.jit(do_not_specialize=["table_stride", "num_rows", "num_heads", "s_q"])
def hopper_fp8_query_kernel(
    q_desc,  # [B, s_q * H, 576 codes] as 16-bit units, boxes [1, 64, 256]
    q_rope_desc,  # the same, boxes [1, 64, 32]
    kv_desc,  # the cache's rows as 16-bit units, boxes [64, 128]
    rope_desc,  # the same, boxes [64, 32]
    q_scale,  # q = e4m3 * q_scale; a number or, with LOAD_Q_SCALE, a pointer to one
    kv_scale,  # value = e4m3 * kv_scale; a number or, with LOAD_SCALE, a pointer to one
    table,  # [B, max_blocks] int32
    seq_lens,  # [B] int32
    parts,  # [parts, 8] int32: the plan
    requests,  # [B, 4] int32: the plan
    out,  # [B, s_q, H, 512] bf16
    lse,  # [B, s_q, H] fp32
    part_acc,  # [slots, s_q * H, 512] fp32
    part_sums,  # [slots, s_q * H, 2] fp32: l, k
    scale_log2,
    table_stride,
    num_rows,  # s_q * H
    num_heads,
    s_q,
    SLOTS: gl.constexpr,  # tiles of the rings
    SLOTS_P: gl.constexpr,
    VALUE_REGS: gl.constexpr,  # registers of a value warpgroup's thread
    LOAD_Q_SCALE: gl.constexpr,
    LOAD_SCALE: gl.constexpr,
    CAUSAL: gl.constexpr,
    CHUNKED: gl.constexpr,
):
    start = read_start(parts)
    ring_a = gl.allocate_shared_memory(gl.bfloat16, [SLOTS, BLOCK, 128], LATENT_UNITS)
    ring_b = gl.allocate_shared_memory(gl.bfloat16, [SLOTS, BLOCK, 128], LATENT_UNITS)
    rope_ring = gl.allocate_shared_memory(gl.bfloat16, [SLOTS, BLOCK, 32], ROPE_UNITS)
    query = gl.allocate_shared_memory(gl.bfloat16, [BLOCK, 256], LATENT_UNITS)
    rope_q = gl.allocate_shared_memory(gl.bfloat16, [BLOCK, 32], ROPE_UNITS)
    p_ring = gl.allocate_shared_memory(gl.float8e4nv, [SLOTS_P, BLOCK, BLOCK], ROPE_CODES)
    factors = gl.allocate_shared_memory(gl.float32, [SLOTS_P, 4 * BLOCK], VECTOR)
    lows = gl.allocate_shared_memory(gl.int32, [SLOTS_P, 4], VECTOR)
    inverse = gl.allocate_shared_memory(gl.float32, [BLOCK], VECTOR)
    limits = gl.allocate_shared_memory(gl.int32, [BLOCK], VECTOR)
    full_a = barriers(SLOTS, 1)
    full_b = barriers(SLOTS, 1)
    full_p = barriers(SLOTS_P, 1)
    empty_p = barriers(SLOTS_P, 2)
    full_q = barriers(1, 1).index(0)
    full_out = barriers(1, 1).index(0)
    empty_out = barriers(1, 2).index(0)
    fence_async_shared()
    gl.warp_specialize(
        [
            (scores_warpgroup, (
                q_desc, q_rope_desc, q_scale, kv_scale,
                start, requests, seq_lens, table, table_stride, lse, part_sums, scale_log2,
                query, rope_q, full_q, ring_a, ring_b, rope_ring, full_a, full_b,
                p_ring, factors, lows, full_p, empty_p, inverse, limits, full_out, empty_out,
                num_rows, num_heads, s_q,
                SLOTS, SLOTS_P, LOAD_Q_SCALE, LOAD_SCALE, CAUSAL, CHUNKED,
            )),
            (values_warpgroup, (
                out, part_acc, kv_desc, rope_desc, table, table_stride, start, requests, seq_lens,
                ring_a, rope_ring, full_a, p_ring, factors, lows, full_p, empty_p,
                inverse, full_out, empty_out, num_rows, 0, SLOTS, SLOTS_P, CHUNKED,
            )),
            (values_warpgroup, (
                out, part_acc, kv_desc, rope_desc, table, table_stride, start, requests, seq_lens,
                ring_b, rope_ring, full_b, p_ring, factors, lows, full_p, empty_p,
                inverse, full_out, empty_out, num_rows, 128, SLOTS, SLOTS_P, CHUNKED,
            )),
        ],
        [4, 4],
        [VALUE_REGS, VALUE_REGS],
    )  # fmt: skip
