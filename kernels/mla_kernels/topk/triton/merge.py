# SPDX-License-Identifier: Apache-2.0
"""A rank's share of the top-k of candidates that all ranks brought.

Two searches, two bits at a time, find what is taken: the K-th largest score and, only where more
candidates tie with it than are taken, the position of the last of those. No order of the
candidates matters to them, so those of each rank stay where the collective put them. Every program
counts the same numbers on every rank.
"""

import triton
import triton.language as tl

from mla_kernels.topk.triton.keys import ordered_key


@triton.jit
def position_of(local, rank, ranks, interleave):
    """Position within its request of a rank's own token; of none anything."""
    return (local // interleave * ranks + rank) * interleave + local % interleave


@triton.jit
def count_three(a, b, c):
    """How many of each of three blocks of up to 2^14, the first two added up in one number."""
    two = tl.sum(a.to(tl.int32) + (b.to(tl.int32) << 16), axis=0)
    return two & 0xFFFF, two >> 16, tl.sum(c.to(tl.int32), axis=0)


@triton.jit(do_not_specialize=["num_rows", "rank", "interleave"])
def merge_topk_kernel(
    candidates_ptr,  # [RANKS, T, 2, K] int32: positions among the rank's own, bits of fp32 scores
    out_ptr,  # [T, K] int32, written; no part of the candidates
    num_rows,
    rank,
    interleave,
    stride_out,
    K: tl.constexpr,
    K_POW2: tl.constexpr,
    RANKS: tl.constexpr,
    RANKS_POW2: tl.constexpr,
):
    """One row a program."""
    row = tl.program_id(0).to(tl.int64)
    entry = tl.arange(0, RANKS_POW2 * K_POW2)
    r = entry // K_POW2
    i = entry % K_POW2
    inside = (r < RANKS) & (i < K)
    at = (r.to(tl.int64) * num_rows + row) * (2 * K) + i
    local = tl.load(candidates_ptr + at, mask=inside, other=-1)
    bits = tl.load(candidates_ptr + at + K, mask=inside, other=0)
    keys = ordered_key(bits.to(tl.float32, bitcast=True), local >= 0)
    position = position_of(local, r, RANKS, interleave).to(tl.uint32, bitcast=True)

    # The largest key that K reach; 0 where fewer candidates than that can be chosen at all.
    threshold = (row * 0).to(tl.uint32)
    for step in range(16):
        one = tl.full((), 1, tl.uint32) << (30 - 2 * step)
        a, b, c = count_three(
            keys >= threshold + one, keys >= threshold + 2 * one, keys >= threshold + 3 * one
        )
        digit = (a >= K).to(tl.uint32) + (b >= K).to(tl.uint32) + (c >= K).to(tl.uint32)
        threshold += digit * one
    ties = keys == threshold
    above, tied, _ = count_three(keys > threshold, ties, ties)
    wanted = K - above
    # The largest position that fewer than `wanted` ties lie before: that of the last one taken.
    last = (row * 0).to(tl.uint32) - 1
    if (tied > wanted) & (threshold > 0):
        last = (row * 0).to(tl.uint32)
        for step in range(16):
            one = tl.full((), 1, tl.uint32) << (30 - 2 * step)
            a, b, c = count_three(
                ties & (position < last + one),
                ties & (position < last + 2 * one),
                ties & (position < last + 3 * one),
            )
            few = (a < wanted).to(tl.uint32) + (b < wanted).to(tl.uint32)
            last += (few + (c < wanted).to(tl.uint32)) * one

    slot = tl.arange(0, K_POW2)
    at = (tl.full((), 0, tl.int64) + rank) * num_rows + row
    own = tl.load(candidates_ptr + at * (2 * K) + slot, mask=slot < K, other=-1)
    bits = tl.load(candidates_ptr + at * (2 * K) + K + slot, mask=slot < K, other=0)
    keys = ordered_key(bits.to(tl.float32, bitcast=True), own >= 0)
    place = position_of(own, rank, RANKS, interleave).to(tl.uint32, bitcast=True)
    taken = (keys > threshold) | ((keys == threshold) & (threshold > 0) & (place <= last))
    count = tl.cumsum(taken.to(tl.int32), axis=0)
    total = tl.sum(taken.to(tl.int32), axis=0)
    out_ptr += row * stride_out
    tl.store(out_ptr + count - 1, own, mask=taken)
    tl.store(out_ptr + slot, -1, mask=(slot >= total) & (slot < K))
