# SPDX-License-Identifier: Apache-2.0
"""A rank's share of the top-k of candidates that all ranks brought.

Two binary searches find what is taken: the K-th largest score, and of the candidates that tie with
it the position of the last one taken. No order of the candidates matters to them, so those of each
rank stay where the collective put them. Every program counts the same numbers on every rank.
"""

import triton
import triton.language as tl

from mla_kernels.topk.triton.keys import ordered_key


@triton.jit
def position_of(local, rank, ranks, interleave):
    """Position within its request of a rank's own token; of none anything."""
    return (local // interleave * ranks + rank) * interleave + local % interleave


@triton.jit
def count(chosen):
    """How many of a block of any shape."""
    return tl.sum(tl.sum(chosen.to(tl.int32), axis=1), axis=0)


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
    r = tl.arange(0, RANKS_POW2)[:, None]
    i = tl.arange(0, K_POW2)[None, :]
    inside = (r < RANKS) & (i < K)
    at = (r.to(tl.int64) * num_rows + row) * (2 * K) + i
    local = tl.load(candidates_ptr + at, mask=inside, other=-1)
    bits = tl.load(candidates_ptr + at + K, mask=inside, other=0)
    keys = ordered_key(bits.to(tl.float32, bitcast=True), local >= 0)
    position = position_of(local, r, RANKS, interleave)

    # The largest key that K reach; 0 where fewer candidates than that can be chosen at all.
    threshold = (row * 0).to(tl.uint32)
    for step in range(32):
        probe = threshold | (tl.full((), 1, tl.uint32) << (31 - step))
        threshold = tl.where(count(keys >= probe) >= K, probe, threshold)
    ties = keys == threshold
    wanted = K - count(keys > threshold)
    # The largest position that fewer than `wanted` ties lie before: that of the last one taken.
    last = (row * 0).to(tl.int32)
    for step in range(31):
        probe = last | (tl.full((), 1, tl.int32) << (30 - step))
        last = tl.where(count(ties & (position < probe)) < wanted, probe, last)

    slot = tl.arange(0, K_POW2)
    at = (tl.full((), 0, tl.int64) + rank) * num_rows + row
    own = tl.load(candidates_ptr + at * (2 * K) + slot, mask=slot < K, other=-1)
    bits = tl.load(candidates_ptr + at * (2 * K) + K + slot, mask=slot < K, other=0)
    keys = ordered_key(bits.to(tl.float32, bitcast=True), own >= 0)
    tied = (keys == threshold) & (position_of(own, rank, RANKS, interleave) <= last)
    taken = (keys > threshold) | (tied & (threshold > 0))
    place = tl.cumsum(taken.to(tl.int32), axis=0) - 1
    total = tl.sum(taken.to(tl.int32), axis=0)
    out_ptr += row * stride_out
    tl.store(out_ptr + place, own, mask=taken)
    tl.store(out_ptr + slot, -1, mask=(slot >= total) & (slot < K))
