# SPDX-License-Identifier: Apache-2.0
"""Exact top-k of rows of any length: a tournament over groups of 8, each round exact.

Level 0 is the row, level L + 1 the largest key of each group of 8 of level L. An element of the
top-k of level L lies in a group of the top-k of level L + 1 (k groups that beat its own would each
hold an element that beats it; ties by lowest index on both levels). So one program selects k groups
on the highest level, gathers their 8 k children, selects k of these, and so on down to the row. It
never holds more than 8 k keys, whatever the scores are: no estimate, no fallback, no atomics.
"""

import triton
import triton.language as tl

from mla_kernels.topk.triton.keys import (
    GROUP,
    UNSELECTABLE,
    group_max,
    load_stored_keys,
    ordered_key,
    store_keys,
)


@triton.jit
def row_length(lengths_ptr, row, width, HAS_LENGTHS: tl.constexpr):
    """Number of scores of a row that take part."""
    if HAS_LENGTHS:
        return tl.maximum(tl.minimum(tl.load(lengths_ptr + row), width), 0)
    return width


@triton.jit
def readable_end(n, ALIGNED: tl.constexpr):
    """Where a masked load of n keys may end: a multiple of 16 keeps it a vector load.

    ALIGNED: rows are whole multiples of 16 (the upper levels always are). What is read past n has
    to be dropped.
    """
    return tl.cdiv(n, 16) * 16 if ALIGNED else n


@triton.jit
def group_max_kernel(
    scores_ptr,  # [T, width] fp32
    lengths_ptr,  # [T] int32
    level1_ptr,  # [T, >= width / 8] int32, written
    level2_ptr,  # [T, >= width / 64] int32, written where LEVELS == 2
    width,
    stride_scores,
    stride_level1,
    stride_level2,
    TOP: tl.constexpr,
    LEVELS: tl.constexpr,
    CHUNK: tl.constexpr,
    HAS_LENGTHS: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Levels 1 and 2 of the rows that need them: the rows longer than TOP."""
    row = tl.program_id(0).to(tl.int64)
    n = row_length(lengths_ptr, row, width, HAS_LENGTHS)
    if n <= TOP:
        return
    first = tl.program_id(1) * CHUNK
    readable = readable_end(n, ALIGNED)
    for start in range(first, n, tl.num_programs(1) * CHUNK):
        i = start + tl.arange(0, CHUNK)
        scores = tl.load(scores_ptr + row * stride_scores + i, mask=i < readable, other=0.0)
        level1 = group_max(tl.where(i < n, ordered_key(scores), UNSELECTABLE), CHUNK)
        i1 = start // GROUP + tl.arange(0, CHUNK // GROUP)
        end1 = tl.cdiv(n, GROUP)
        store_keys(level1_ptr + row * stride_level1 + i1, level1, i1 < readable_end(end1, True))
        if LEVELS == 2:
            level2 = group_max(level1, CHUNK // GROUP)
            i2 = start // (GROUP * GROUP) + tl.arange(0, CHUNK // (GROUP * GROUP))
            end2 = tl.cdiv(end1, GROUP)
            store_keys(level2_ptr + row * stride_level2 + i2, level2, i2 < readable_end(end2, True))


@triton.jit
def find_threshold(keys, floor, K: tl.constexpr):
    """(threshold, ties, total, reached_by_k): the top K of `keys` are all above `threshold`, then
    the first `ties` equal to it; `total` of them. Keys below `floor` do not count; `reached_by_k`
    is a key that at least K of them reach, or `floor`.

    Bisection of the key range, sped up by interpolating the counts (the Illinois rule), with a
    plain halving at least every other step. Stops early where exactly K keys reach the probe.
    """
    counts = keys >= floor
    count_lo = tl.sum(counts.to(tl.int32))
    total = tl.minimum(count_lo, K)
    lo = floor
    hi = floor + 1
    count_hi = 0
    if count_lo > K:
        lo = tl.min(tl.where(counts, keys, 0xFFFFFFFF))
        hi = tl.max(keys) + 1
    # Invariant: more than K keys reach lo (count_lo), fewer than K reach hi (count_hi).
    weight_lo = (count_lo - K).to(tl.float32)
    weight_hi = 1.0 * K
    last_reached = False
    last_missed = False
    halve = False
    while (hi - lo > 1) & (count_lo > K):
        gap = hi - lo
        guess = (gap.to(tl.float32) * (weight_lo / (weight_lo + weight_hi))).to(tl.uint32)
        offset = tl.where(halve, gap >> 1, tl.minimum(tl.maximum(guess, 1), gap - 1))
        probe = lo + offset
        count = tl.sum((keys >= probe).to(tl.int32))
        reached = count >= K
        if reached:
            lo = probe
            count_lo = count
            weight_lo = (count - K).to(tl.float32)
            weight_hi = tl.where(last_reached, weight_hi * 0.5, weight_hi)
        else:
            hi = probe
            count_hi = count
            weight_hi = (K - count).to(tl.float32)
            weight_lo = tl.where(last_missed, weight_lo * 0.5, weight_lo)
        last_reached = reached
        last_missed = count < K
        halve = ((hi - lo) > (gap >> 1)) & (halve == 0)
    # Where exactly K keys reach lo (or fewer than K exist), those are all above lo - 1.
    all_of_lo = count_lo <= K
    threshold = tl.where(all_of_lo, lo - 1, lo)
    ties = tl.where(all_of_lo, 0, K - count_hi)
    return threshold, ties, total, lo


@triton.jit
def store_top(keys, floor, items, out_ptr, K: tl.constexpr):
    """Writes the items of the K largest keys, in the order they stand in.

    Returns how many, and a lower bound of the K-th key for the next level.
    """
    threshold, ties, total, next_floor = find_threshold(keys, floor, K)
    above = keys > threshold
    equal = keys == threshold
    # One scan for both ranks: at most K <= 2048 keys are above, at most 2^14 equal.
    ranks = tl.cumsum(above.to(tl.int32) + (equal.to(tl.int32) << 12), axis=0)
    rank_equal = ranks >> 12
    position = (ranks & 0xFFF) + tl.minimum(rank_equal, ties) - 1
    taken = above | (equal & (rank_equal <= ties))
    # In one word (an item has 20 bits) whose order is free: then each thread stores what it holds,
    # and nothing is exchanged to bring neighbours together.
    packed = tl.where(taken, items | (position << 20), -1)
    packed = tl.reshape(packed, packed.shape, can_reorder=True)
    tl.store(out_ptr + (packed >> 20), packed & 0xFFFFF, mask=packed >= 0)
    return total, next_floor


@triton.jit
def load_keys(
    scores_ptr, level1_ptr, level2_ptr, level, items, size, readable, LEVELS: tl.constexpr
):
    """Keys of `items` on `level`, of those below `size`; the `readable` ones are loaded."""
    if LEVELS == 0 or level == 0:
        keys = ordered_key(tl.load(scores_ptr + items, mask=readable, other=0.0))
    elif level == 1:
        keys = load_stored_keys(level1_ptr + items, readable)
    else:
        keys = load_stored_keys(level2_ptr + items, readable)
    return tl.where(readable & (items < size), keys, UNSELECTABLE)


@triton.jit
def select_kernel(
    scores_ptr,  # [T, width] fp32
    lengths_ptr,  # [T] int32
    level1_ptr,  # [T, >= width / 8] int32
    level2_ptr,  # [T, >= width / 64] int32
    out_ptr,  # [T, K] int32, written
    width,
    stride_scores,
    stride_level1,
    stride_level2,
    stride_out,
    K: tl.constexpr,
    K_POW2: tl.constexpr,
    TOP: tl.constexpr,
    LEVELS: tl.constexpr,
    HAS_LENGTHS: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """One row a program. `out` also holds the selected groups between the levels."""
    row = tl.program_id(0).to(tl.int64)
    n = row_length(lengths_ptr, row, width, HAS_LENGTHS)
    scores_ptr += row * stride_scores
    out_ptr += row * stride_out

    level = 0
    size = n
    if LEVELS > 0:
        level1_ptr += row * stride_level1
        level2_ptr += row * stride_level2
        while size > TOP:
            size = tl.cdiv(size, GROUP)
            level += 1
    items = tl.arange(0, TOP)
    readable = items < readable_end(size, ALIGNED)
    keys = load_keys(scores_ptr, level1_ptr, level2_ptr, level, items, size, readable, LEVELS)
    floor = (n * 0 + 1).to(tl.uint32)  # the lowest selectable key
    total, floor = store_top(keys, floor, items, out_ptr, K)
    if LEVELS > 0:
        slot = tl.arange(0, K_POW2)
        while level > 0:
            level -= 1
            size = tl.where(level == 0, n, tl.cdiv(n, GROUP))
            tl.debug_barrier()  # the groups that other threads stored
            group = tl.load(out_ptr + slot, mask=slot < total, other=0)
            child = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
            chosen = (slot < total)[:, None]
            if not ALIGNED:
                chosen = chosen & (child < size)
            child_keys = load_keys(
                scores_ptr, level1_ptr, level2_ptr, level, child, size, chosen, LEVELS
            )
            # K groups reach the last level's K-th key, so at least K children do.
            child_keys = tl.reshape(child_keys, (K_POW2 * GROUP,))
            child = tl.reshape(child, (K_POW2 * GROUP,))
            total, floor = store_top(child_keys, floor, child, out_ptr, K)
    pad = tl.arange(0, K_POW2)
    tl.store(out_ptr + pad, -1, mask=(pad >= total) & (pad < K))
