# SPDX-License-Identifier: Apache-2.0
"""The Hopper sparse kernel: one CTA is 64 heads of one token times one range of its slots. With
bf16 rows and tokens in one range ("the stream", stream.py) it is 64 heads of token after token;
with shares (walk.py; of bf16 rows in the stream too) of the end of a token and the beginning of the
next.

    rows, by slot ─cp.async─> ring A [64 x 256] ──┬─────────────> WG1   O[:,   0:256] += P V
    rows, by slot ─cp.async─> ring B [64 x 256] ──┼──┬──────────> WG2   O[:, 256:512] += P V
    rows, by slot ─cp.async─> ring R [64 x  64] ──┼──┤             ▲
    (fp8_ds_mla: codes ──> fp16, by WG1 and WG2)  └──┴─> WG0  S = Q K^T, softmax ── P ──┘

    barrier      arrives                        waits          means
    landed_q     TMA; not in the stream         WG0            the query tile is in the rings
    full_q       WG0                            WG1, WG2       it is in registers; the number of
                                                               tiles is published
    full_a/b     bf16: the copies of WG1, WG2   WG0            a tile of the ring is there; ring B's
                 fp8_ds_mla: WG1, WG2                          stands for ring R's too
                 the stream's queries: TMA, and                ring A's: the number of tiles too
                 WG1, WG2 for the other 127
    full_v       bf16: WG2                      WG0            which slots of the tile name a row
    full_p_a/b   WG0                            WG1 / WG2      P(n) and its factors are published
    empty_p      WG1, WG2                       WG0            both have read P(n)
    full_out     WG0; of whole tokens only      WG1, WG2       1 / l is published
    empty_out    WG1, WG2; in the stream of     WG0            both have read it
                 whole tokens only

WG1 and WG2 gather the rows whose columns they multiply, each thread 16 bytes at a time: a ring slot
is free for its next tile when their own PV is done, and they never wait for a tile, since P(n)
exists only if WG0 saw tile n. bf16 rows land where the products read them. Codes land in buffers
of their own; WG1 and WG2 turn those of tile n + 1 into fp16 before they wait for P(n).
Scales land a tile ahead of their codes: what M the next tile has (decode/hopper/scales.py) is found
out while P V runs.

In the stream a wait by parity is right if its barrier is never two phases ahead of a waiter:
* full_a, full_b, full_v: a slot is filled again only when its item was used, a query after full_q,
  a tile after P; WG0 waits once for each item, a query's full_v among them.
* full_p, empty_p: one arrival each (empty_p: two) and one wait a tile, for all tokens on end.
* full_out, empty_out: WG0 publishes 1 / l of token t after both have read that of token t - 1.
* full_q: WG0 reads query t + 1 after that wait, at the end of token t; WG1 and WG2 wait for query t
  before they read 1 / l of token t - 1. Of the first token there is no such wait, but they ask for
  no other query before they have waited for the first.
So the number of tiles that WG0 passes on needs two places: that of token t is read before 1 / l of
token t, and written over, at query t + 2, after that. Nobody waits in a circle: WG0 needs from the
others only what precedes their wait for full_q(t + 1): PV of token t, and query t + 1, which is
asked for when a tile of token t or t - 1, or query t, is done with.
Past the last token the rings get tiles without rows, which nobody waits for.
With shares there is no 1 / l, and nobody waits at the end of a token: a share is of two tokens at
most (shares.py), each with its own phase of full_q and its own place for the number of its tiles,
and query 1 is asked for after full_q(0). Were empty_out waited for there, WG1 and WG2 could arrive
for the last token before WG0 waits for the one before, and it would wait for ever.

Of shares with fp8_ds_mla rows the ranges come one after the other: WG0 asks for the second query
when both have read all P of the first token, so that the rings are free and the number of its
tiles is read.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from mla_kernels.decode.hopper.barriers import barriers
from mla_kernels.decode.hopper.layouts import BLOCK, HALF, ROPE, TILE, VECTOR
from mla_kernels.sparse.hopper.layouts import CODES, SCALES
from mla_kernels.sparse.hopper.scores import scores_warpgroup
from mla_kernels.sparse.hopper.scores_stream import scores_stream_warpgroup
from mla_kernels.sparse.hopper.values_bf16 import values_warpgroup
from mla_kernels.sparse.hopper.values_fp8 import values_fp8_warpgroup
from mla_kernels.sparse.hopper.values_stream import values_stream_warpgroup

NOT_SPECIALIZED = ["slots_stride", "num_slots", "K", "span", "splits", "num_heads", "num_tokens"]


@gluon.jit(do_not_specialize=NOT_SPECIALIZED)
def hopper_sparse_kernel(
    q_desc,  # latent part [T, H, 512] bf16, boxes [1, 64, 256]
    q_rope_desc,  # rope part [T, H, 64] bf16, boxes [1, 64, 64]
    kv,  # the cache: bf16, or fp8_ds_mla rows as uint8, fp32 and bf16
    kv_scale,
    kv_rope,
    slots,  # [T, K] int32
    lengths,  # [T] int32, with HAS_LENGTHS
    sink,  # [H] fp32, with HAS_SINK
    out,  # [T, H, 512] bf16
    lse,  # [T, H] fp32
    max_logits,  # [T, H] fp32, with MAX_LOGITS; -inf before, with SPLIT
    part_acc,  # [T, splits, H, 512] fp32, with SPLIT
    part_sums,  # [T, splits, H, 2] fp32: l, k
    scale_log2,
    page_stride,
    slots_stride,
    num_slots,  # of the cache
    K,
    span,  # slots of a program, a multiple of 64
    splits,  # partial results for each token
    num_heads,
    num_tokens,  # of the call, for walk.py
    SLOTS_A: gl.constexpr,
    SLOTS_B: gl.constexpr,
    SLOTS_R: gl.constexpr,
    SLOTS_P: gl.constexpr,
    WORKER_REGS: gl.constexpr,
    FORMAT: gl.constexpr,  # of the cache: "bf16" or "fp8_ds_mla"
    PAGE: gl.constexpr,
    ROW: gl.constexpr,
    HAS_LENGTHS: gl.constexpr,
    HAS_SINK: gl.constexpr,
    SPLIT: gl.constexpr,
    SHARES: gl.constexpr,  # of all tokens, with SPLIT: walk.py
    MAX_LOGITS: gl.constexpr,
):
    COUNT: gl.constexpr = 128 if FORMAT == "bf16" else 1
    DTYPE: gl.constexpr = gl.bfloat16 if FORMAT == "bf16" else gl.float16
    q_shared = gl.allocate_shared_memory(DTYPE, [BLOCK, 128], TILE)
    ring_a = gl.allocate_shared_memory(DTYPE, [SLOTS_A, BLOCK, HALF], TILE)
    ring_b = gl.allocate_shared_memory(DTYPE, [SLOTS_B, BLOCK, HALF], TILE)
    ring_r = gl.allocate_shared_memory(gl.bfloat16, [SLOTS_R, BLOCK, ROPE], TILE)
    offsets = gl.allocate_shared_memory(gl.float32, [SLOTS_R, BLOCK], VECTOR)
    p_ring = gl.allocate_shared_memory(DTYPE, [SLOTS_P, BLOCK, BLOCK], TILE)
    factors = gl.allocate_shared_memory(gl.float32, [SLOTS_P, BLOCK], VECTOR)
    inverse = gl.allocate_shared_memory(gl.float32, [BLOCK], VECTOR)
    STREAM: gl.constexpr = FORMAT == "bf16" and (SHARES or not SPLIT)
    if STREAM:
        num_tiles = gl.allocate_shared_memory(gl.int32, [2, 1], VECTOR)
    else:
        num_tiles = gl.allocate_shared_memory(gl.int32, [1], VECTOR)
    full_a = barriers(SLOTS_A, COUNT)
    full_b = barriers(SLOTS_B, COUNT)
    full_p_a = barriers(SLOTS_P, 1)
    full_p_b = barriers(SLOTS_P, 1)
    empty_p = barriers(SLOTS_P, 2)
    if not STREAM:
        landed_q = barriers(1, 1).index(0)
    full_q = barriers(1, 1).index(0)
    full_out = full_q
    empty_out = full_q
    if not SPLIT:  # with ranges nobody waits for it, and the place of a dead barrier is used again
        full_out = barriers(1, 1).index(0)
    if STREAM:
        counts = gl.allocate_shared_memory(gl.int32, [SLOTS_A, 1], VECTOR)
        found = gl.allocate_shared_memory(gl.int32, [2, 4], VECTOR)
        full_v = barriers(SLOTS_R, 1)
        if not SPLIT:
            empty_out = barriers(1, 2).index(0)
        fence_async_shared()
        gl.warp_specialize(
            [
                (scores_stream_warpgroup, (
                    num_tokens, K, span, splits, num_heads, scale_log2, sink, lse, max_logits,
                    part_sums, q_shared, ring_a, ring_b, ring_r, offsets, counts, num_tiles,
                    full_a, full_b, full_v, full_q, p_ring, full_p_a, full_p_b, empty_p, factors,
                    inverse, full_out, empty_out, SLOTS_A, SLOTS_B, SLOTS_R, SLOTS_P,
                    HAS_SINK, MAX_LOGITS, SHARES,
                )),
                (values_stream_warpgroup, (
                    q_desc, q_rope_desc, out, part_acc, kv, slots, slots_stride, lengths, K, span,
                    splits, num_tokens, num_slots, page_stride, num_heads, ring_a, full_a, ring_r,
                    offsets, full_v, counts, found.index(0), num_tiles, full_q, p_ring, full_p_a,
                    empty_p, factors, inverse, full_out, empty_out, 0, SLOTS_A, SLOTS_P,
                    PAGE, ROW, HAS_LENGTHS, SHARES,
                )),
                (values_stream_warpgroup, (
                    q_desc, q_rope_desc, out, part_acc, kv, slots, slots_stride, lengths, K, span,
                    splits, num_tokens, num_slots, page_stride, num_heads, ring_b, full_b, ring_r,
                    offsets, full_v, counts, found.index(1), num_tiles, full_q, p_ring, full_p_b,
                    empty_p, factors, inverse, full_out, empty_out, HALF, SLOTS_B, SLOTS_P,
                    PAGE, ROW, HAS_LENGTHS, SHARES,
                )),
            ],
            [4, 4],
            [WORKER_REGS, WORKER_REGS],
        )  # fmt: skip
    elif FORMAT == "bf16":  # a token in several ranges
        full_v = barriers(SLOTS_R, 1)
        fence_async_shared()
        gl.warp_specialize(
            [
                (scores_warpgroup, (
                    q_desc, q_rope_desc, slots, slots_stride, lengths, K, span, splits, num_tokens,
                    num_slots, page_stride, num_heads, scale_log2, sink, lse, max_logits,
                    part_sums, q_shared,
                    ring_a, ring_b, ring_r, offsets, offsets, num_tiles, full_a, full_b, full_v,
                    landed_q, full_q, p_ring, full_p_a, full_p_b, empty_p, factors, inverse,
                    full_out, SLOTS_A, SLOTS_B, SLOTS_R, SLOTS_P,
                    PAGE, ROW, HAS_LENGTHS, HAS_SINK, SPLIT, SHARES, MAX_LOGITS, False,
                )),
                (values_warpgroup, (
                    part_acc, kv, slots, slots_stride, lengths, K, span, num_slots,
                    page_stride, num_heads, ring_a, full_a, ring_r, offsets, full_v,
                    num_tiles, full_q, p_ring, full_p_a, empty_p, factors,
                    0, SLOTS_A, SLOTS_P, PAGE, ROW, HAS_LENGTHS,
                )),
                (values_warpgroup, (
                    part_acc, kv, slots, slots_stride, lengths, K, span, num_slots,
                    page_stride, num_heads, ring_b, full_b, ring_r, offsets, full_v,
                    num_tiles, full_q, p_ring, full_p_b, empty_p, factors,
                    HALF, SLOTS_B, SLOTS_P, PAGE, ROW, HAS_LENGTHS,
                )),
            ],
            [4, 4],
            [WORKER_REGS, WORKER_REGS],
        )  # fmt: skip
    else:
        codes_a = gl.allocate_shared_memory(gl.uint8, [BLOCK, HALF], CODES)
        codes_b = gl.allocate_shared_memory(gl.uint8, [BLOCK, HALF], CODES)
        scales_a = gl.allocate_shared_memory(gl.float32, [2, BLOCK, 4], SCALES)
        scales_b = gl.allocate_shared_memory(gl.float32, [2, BLOCK, 4], SCALES)
        m_ring = gl.allocate_shared_memory(gl.float32, [SLOTS_R, 1], VECTOR)
        fence_async_shared()
        gl.warp_specialize(
            [
                (scores_warpgroup, (
                    q_desc, q_rope_desc, slots, slots_stride, lengths, K, span, splits, num_tokens,
                    num_slots, page_stride, num_heads, scale_log2, sink, lse, max_logits,
                    part_sums, q_shared,
                    ring_a, ring_b, ring_r, offsets, m_ring, num_tiles, full_a, full_b, full_b,
                    landed_q, full_q, p_ring, full_p_a, full_p_b, empty_p, factors, inverse,
                    full_out, SLOTS_A, SLOTS_B, SLOTS_R, SLOTS_P,
                    PAGE, ROW, HAS_LENGTHS, HAS_SINK, SPLIT, SHARES, MAX_LOGITS, True,
                )),
                (values_fp8_warpgroup, (
                    out, part_acc, kv, kv_scale, kv_rope, slots, slots_stride,
                    lengths, K, span, splits, num_tokens, num_slots, page_stride, num_heads,
                    ring_a, full_a, codes_a, scales_a, ring_r, offsets, m_ring, num_tiles, full_q,
                    p_ring, full_p_a, empty_p, factors, inverse, full_out,
                    0, SLOTS_R, SLOTS_P, PAGE, ROW, HAS_LENGTHS, SPLIT, SHARES,
                )),
                (values_fp8_warpgroup, (
                    out, part_acc, kv, kv_scale, kv_rope, slots, slots_stride,
                    lengths, K, span, splits, num_tokens, num_slots, page_stride, num_heads,
                    ring_b, full_b, codes_b, scales_b, ring_r, offsets, m_ring, num_tiles, full_q,
                    p_ring, full_p_b, empty_p, factors, inverse, full_out,
                    HALF, SLOTS_R, SLOTS_P, PAGE, ROW, HAS_LENGTHS, SPLIT, SHARES,
                )),
            ],
            [4, 4],
            [WORKER_REGS, WORKER_REGS],
        )  # fmt: skip
