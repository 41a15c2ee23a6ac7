# SPDX-License-Identifier: Apache-2.0
"""The Hopper decode kernel for fp8 caches: one CTA is N query rows times one part of the plan.

    TMA ──> ring A [64 x 256 codes] ──┬──────────> WG1   O^T[  0:256, :] += V^T P^T  (loads ring A)
    TMA ──> ring B [64 x 256 codes] ──┼─┬────────> WG2   O^T[256:512, :] += V^T P^T  (loads ring B
    TMA ──> rope ring [64 x 64]     ──┤ │            ▲                      and the rope ring)
                                      ├─┴─> WG0  P^T ┤   of even tiles: S^T = K Q^T, softmax
                                      └───> WG3  P^T ┘   of odd tiles

Tokens, and columns of O, are wgmma's M, query rows its N: 16 or 32 rows are not padded to 64. Codes
are wgmma's A operand, which may come from registers: a tile is written to shared memory once, as
bytes, read twice, and becomes fp16, exactly, in the registers that the tensor cores read
(operands.py). Neither K nor V is rounded to bf16.

    barrier      arrives       waits            means
    full_a/b     TMA           WG0 or 3; WG1/2  a half tile (b: and what follows it) has landed
    full_q       TMA           WG0, WG3         the query tile has landed
    full_tops    WG0, WG3      WG3, WG0         the largest of both halves of it are known
    ready_q      WG0, WG3      WG3, WG0         both are converted, and the references are reset
    decided      WG0 / WG3     WG3 / WG0        a tile's references are final
    full_p       WG0 / WG3     WG1, WG2         P^T of a tile and its factors are published
    empty_p      WG1, WG2      WG0 / WG3        both have read it
    full_sums    WG3           WG0              its row sums of the segment
    full_out     WG0           WG1, WG2         1 / l of the segment is published
    empty_out    WG1, WG2      WG0              both have read it

A ring slot is free for its next load when its warpgroup has multiplied it: P^T of a tile exists
only if its scores are done. P^T has two slots, one for WG0's tiles and one for WG3's. The next
segment's query is asked for when the last scores of a segment are made, by the warpgroup of WG0 and
WG3 that has not made them.

fp8_ds_mla: a group of 128 columns of a token has the scale s_g. Keys and values are their codes
times s_g / M in fp16, M a power of two of the tile (../scales.py). Each scores warpgroup keeps its
own M from tile to tile of a segment, and writes the ratios s_g / M that keys and values take. The
query's rope part is over M = 2^FIRST; a tile with another M, which is rare, has its rope columns
multiplied by the rest. Up to 16 rows have registers and shared memory to scale neither keys nor
values: each group's scores are a sum of their own, times s_g at the end, P follows t + log2 max s
instead of the score t and is written once a group, times s_g / max s, and the row sum divides by
max s again.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from mla_kernels.decode.hopper.barriers import barriers
from mla_kernels.decode.hopper.fp8.operands import rows_of
from mla_kernels.decode.hopper.fp8.scores import ONE, scores_warpgroup
from mla_kernels.decode.hopper.fp8.values import values_warpgroup
from mla_kernels.decode.hopper.layouts import BLOCK, DS_MLA_ROPE, SCALES, VECTOR
from mla_kernels.decode.hopper.segments import read_start


@gluon.jit(do_not_specialize=["table_stride", "num_rows", "num_heads", "s_q"])
def hopper_fp8_kernel(
    q_desc,  # latent part [B, s_q * H, 512] bf16, boxes [1, N, query_box(N)]
    q_rope_desc,  # rope part [B, s_q * H, 64] bf16, boxes [1, N, 64]
    kv_desc,  # the cache's rows as 16-bit units, boxes [64, 128]
    rope_desc,  # the same, boxes [64, 32]; fp8_ds_mla: [64, 64]
    scale_desc,  # fp8_ds_mla: the rows as fp32, boxes [64, 4]
    kv_scale,  # fp8: value = e4m3 * kv_scale; a number or, with LOAD_SCALE, a pointer to one
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
    N: gl.constexpr,  # and below: configs.py
    SLOTS: gl.constexpr,
    ADDENDS: gl.constexpr,
    AHEAD: gl.constexpr,
    PENDING: gl.constexpr,
    SCALE_OF: gl.constexpr,
    VALUE_REGS: gl.constexpr,
    SCORE_REGS: gl.constexpr,
    LOAD_SCALE: gl.constexpr,
    CAUSAL: gl.constexpr,
    CHUNKED: gl.constexpr,
):  # fmt: skip
    GROUPED: gl.constexpr = SCALE_OF != "cache"
    PLANES: gl.constexpr = 4 if SCALE_OF == "token" else 1
    ROPE_COL: gl.constexpr = DS_MLA_ROPE if GROUPED else 256
    start = read_start(parts)
    ring_a = gl.allocate_shared_memory(gl.bfloat16, [SLOTS, BLOCK, 128], rows_of(128))
    ring_b = gl.allocate_shared_memory(gl.bfloat16, [SLOTS, BLOCK, 128], rows_of(128))
    query = gl.allocate_shared_memory(gl.float16, [8 if N < 64 else 9, N, 64], rows_of(64))
    query_rope = query  # its last block
    if N < 64:
        query_rope = gl.allocate_shared_memory(gl.float16, [1, N, 64], rows_of(64))
    if GROUPED:
        rope_ring = gl.allocate_shared_memory(gl.bfloat16, [SLOTS, BLOCK, 64], rows_of(64))
        scale_ring = gl.allocate_shared_memory(gl.float32, [SLOTS, BLOCK, 4], SCALES)
    else:
        rope_ring = gl.allocate_shared_memory(gl.bfloat16, [SLOTS, BLOCK, 32], rows_of(32))
        scale_ring = rope_ring
    ratios = scale_ring
    if SCALE_OF == "tile":
        ratios = gl.allocate_shared_memory(gl.float16, [SLOTS, 4 * BLOCK], VECTOR)
    p_ring = gl.allocate_shared_memory(gl.float16, [2 * PLANES, BLOCK, N], rows_of(N))
    bases = gl.allocate_shared_memory(gl.float32, [N], VECTOR)
    factors = gl.allocate_shared_memory(gl.float32, [2, N], VECTOR)
    moved = gl.allocate_shared_memory(gl.int32, [2, 1], VECTOR)
    tops = gl.allocate_shared_memory(gl.float32, [2, 1], VECTOR)
    row_scales = gl.allocate_shared_memory(gl.float32, [1], VECTOR)
    sums = gl.allocate_shared_memory(gl.float32, [N], VECTOR)
    inverse = gl.allocate_shared_memory(gl.float32, [N], VECTOR)
    limits = gl.allocate_shared_memory(gl.int32, [N], VECTOR)
    zeros = gl.allocate_shared_memory(gl.int32, [1], VECTOR)
    zeros.store(gl.full([1], 0, gl.int32, ONE))
    for j in gl.static_range(2):  # read before the first tile has written its own
        moved.index(j).store(gl.full([1], 0, gl.int32, ONE))
    full_a = barriers(SLOTS, 1)
    full_b = barriers(SLOTS, 1)
    full_p = barriers(2, 1)
    empty_p = barriers(2, 2)
    decided = barriers(2, 1)
    full_q = barriers(1, 1).index(0)
    full_tops = barriers(1, 2).index(0)
    ready_q = barriers(1, 2).index(0)
    full_sums = barriers(1, 1).index(0)
    full_out = barriers(1, 1).index(0)
    empty_out = barriers(1, 2).index(0)
    fence_async_shared()
    gl.warp_specialize(
        [
            (scores_warpgroup, (
                q_desc, q_rope_desc, kv_scale,
                start, requests, seq_lens, table, table_stride, lse, part_sums, scale_log2,
                query, query_rope, full_q, tops, full_tops, ready_q, row_scales,
                ring_a, ring_b, rope_ring, scale_ring, ratios,
                full_a, full_b, p_ring, bases, factors, moved, decided,
                full_p, empty_p, sums, limits, zeros, full_sums, inverse, full_out, empty_out,
                num_rows, num_heads, s_q,
                0, N, SLOTS, ADDENDS, AHEAD, SCALE_OF, LOAD_SCALE, CAUSAL, CHUNKED,
            )),
            (values_warpgroup, (
                out, part_acc, kv_desc, rope_desc, scale_desc, table, table_stride,
                start, requests, seq_lens,
                ring_a, rope_ring, scale_ring, full_a, p_ring, factors, moved, ratios,
                full_p, empty_p, inverse, full_out, empty_out, num_rows,
                0, ROPE_COL, N, SLOTS, PENDING, SCALE_OF, CHUNKED,
            )),
            (values_warpgroup, (
                out, part_acc, kv_desc, rope_desc, scale_desc, table, table_stride,
                start, requests, seq_lens,
                ring_b, rope_ring, scale_ring, full_b, p_ring, factors, moved, ratios,
                full_p, empty_p, inverse, full_out, empty_out, num_rows,
                128, ROPE_COL, N, SLOTS, PENDING, SCALE_OF, CHUNKED,
            )),
            (scores_warpgroup, (
                q_desc, q_rope_desc, kv_scale,
                start, requests, seq_lens, table, table_stride, lse, part_sums, scale_log2,
                query, query_rope, full_q, tops, full_tops, ready_q, row_scales,
                ring_a, ring_b, rope_ring, scale_ring, ratios,
                full_a, full_b, p_ring, bases, factors, moved, decided,
                full_p, empty_p, sums, limits, zeros, full_sums, inverse, full_out, empty_out,
                num_rows, num_heads, s_q,
                1, N, SLOTS, ADDENDS, AHEAD, SCALE_OF, LOAD_SCALE, CAUSAL, CHUNKED,
            )),
        ],
        [4, 4, 4],
        [VALUE_REGS, VALUE_REGS, SCORE_REGS],
    )  # fmt: skip
