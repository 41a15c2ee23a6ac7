# SPDX-License-Identifier: Apache-2.0
"""Exact top-k of rows of any length: a tournament over groups of 8, each round exact.

Level 0 is the row, level L + 1 the largest key of each group of 8 of level L. An element of the
top-k of level L lies in a group of the top-k of level L + 1 (k groups that beat its own would each
hold an element that beats it; ties by lowest index on both levels). So one program selects k groups
on the highest level, gathers their 8 k children, selects k of these, and so on down to the row. It
never holds more keys than 8 k or the highest level, whatever the scores are: no estimate, no
fallback, no atomics but for counts in its shared memory.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from mla_kernels.topk.triton.keys import (
    GROUP,
    UNSELECTABLE,
    group_max,
    load_stored_keys,
    ordered_key,
    store_keys,
)
from mla_kernels.topk.triton.ptx import again, reserve_counters, scatter
from mla_kernels.topk.triton.threshold import find_threshold, scan_rows

# A cache modifier: as loads are by default. A bare string as a default is no constexpr to Triton.
BY_L1 = tl.constexpr("")


@triton.jit
def row_length(
    lengths_ptr, row, width, HAS_LENGTHS: tl.constexpr, CACHE_MODIFIER: tl.constexpr = BY_L1
):
    """Number of scores of a row that take part."""
    if HAS_LENGTHS:
        length = tl.load(lengths_ptr + row, cache_modifier=CACHE_MODIFIER)
        return tl.maximum(tl.minimum(length, width), 0)
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
    PDL: tl.constexpr,
):
    """Levels 1 and 2 of the rows that need them: the rows longer than TOP."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    n = row_length(lengths_ptr, row, width, HAS_LENGTHS)
    if n <= TOP:
        return
    first = tl.program_id(1) * CHUNK
    readable = readable_end(n, ALIGNED)
    for start in range(first, n, tl.num_programs(1) * CHUNK):
        i = start + tl.arange(0, CHUNK)
        scores = tl.load(scores_ptr + row * stride_scores + i, mask=i < readable, other=0.0)
        level1 = group_max(ordered_key(scores, i < n), CHUNK)
        i1 = start // GROUP + tl.arange(0, CHUNK // GROUP)
        end1 = tl.cdiv(n, GROUP)
        store_keys(level1_ptr + row * stride_level1 + i1, level1, i1 < readable_end(end1, True))
        if LEVELS == 2:
            level2 = group_max(level1, CHUNK // GROUP)
            i2 = start // (GROUP * GROUP) + tl.arange(0, CHUNK // (GROUP * GROUP))
            end2 = tl.cdiv(end1, GROUP)
            store_keys(level2_ptr + row * stride_level2 + i2, level2, i2 < readable_end(end2, True))


@triton.jit
def children(group):
    return group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]


@triton.jit
def store_top(
    keys, floor, top, group, out_ptr, K: tl.constexpr, N: tl.constexpr, PTX: tl.constexpr
):
    """Writes which of the N children of some groups have the K largest keys, in their order.

    Returns how many, a key that as many reach, and the largest key.
    """
    counters = 0
    if PTX:
        counters = reserve_counters()
    keys, threshold, bound, top, total = find_threshold(keys, floor, top, counters, K, N, PTX)
    taken = keys >= threshold
    # Rows of 128, which a warp holds side by side.
    ranks = scan_rows(tl.reshape(taken.to(tl.int32), (N // 128, 128)))
    position = tl.where(taken, tl.reshape(ranks, (N,)) - 1, -1)
    if PTX:
        group = again(group)
    items = tl.reshape(children(group), (N,))
    if PTX:
        scatter(out_ptr, position, items)
    else:
        tl.store(out_ptr + position, items, mask=taken)
    return total, bound, top


@triton.jit
def select_children(
    scores_ptr,
    level1_ptr,
    level2_ptr,
    out_ptr,
    level,
    size,
    group,  # [N / GROUP] int32: the groups whose children compete, the first `num_groups` of them
    num_groups,
    floor,
    top,
    K: tl.constexpr,
    N: tl.constexpr,
    LEVELS: tl.constexpr,
    ALIGNED: tl.constexpr,
    PTX: tl.constexpr,
):
    """One round: the top K on `level` (of `size` entries) among the children of some groups."""
    items = children(group)
    inside = items < size
    # Rows of whole groups are read to the end of the group: a vector load.
    readable = (tl.arange(0, N // GROUP) < num_groups)[:, None]
    if not ALIGNED:
        readable = readable & inside
    if LEVELS == 0 or level == 0:
        scores = tl.load(scores_ptr + items, mask=readable, other=float("-inf"))
        keys = ordered_key(scores, inside)
    elif level == 1:
        keys = tl.where(inside, load_stored_keys(level1_ptr + items, readable), UNSELECTABLE)
    else:
        keys = tl.where(inside, load_stored_keys(level2_ptr + items, readable), UNSELECTABLE)
    return store_top(tl.reshape(keys, (N,)), floor, top, group, out_ptr, K, N, PTX)


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
    TILE: tl.constexpr,
    LEVELS: tl.constexpr,
    HAS_LENGTHS: tl.constexpr,
    ALIGNED: tl.constexpr,
    PTX: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row a program. `out` also holds the selected groups between the levels."""
    if PDL:
        gdc_wait()
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
    highest = level
    num_groups = tl.cdiv(size, GROUP)  # the highest level is taken whole
    floor = (n * 0 + 1).to(tl.uint32)  # the lowest selectable key
    top = floor - 1  # the largest key of the row, which every level has: not known yet
    slot = tl.arange(0, TILE // GROUP)
    group = slot
    if TOP < TILE:
        num_groups, floor, top = select_children(
            scores_ptr, level1_ptr, level2_ptr, out_ptr, level, size, tl.arange(0, TOP // GROUP),
            num_groups, floor, top, K, TOP, LEVELS, ALIGNED, PTX,
        )  # fmt: skip
        level -= 1
    while level >= 0:
        if level < highest:
            size = tl.where(level == 0, n, tl.cdiv(n, GROUP))
            tl.debug_barrier()  # the groups that other threads stored
            if PTX:
                slot = again(slot)
            group = tl.load(out_ptr + slot, mask=slot < num_groups, other=0)
        # K groups reach the floor, so at least K of their children do.
        num_groups, floor, top = select_children(
            scores_ptr, level1_ptr, level2_ptr, out_ptr, level, size, group,
            num_groups, floor, top, K, TILE, LEVELS, ALIGNED, PTX,
        )  # fmt: skip
        level -= 1
    pad = tl.arange(0, K_POW2)
    if PTX:
        pad = again(pad)
    tl.store(out_ptr + pad, -1, mask=(pad >= num_groups) & (pad < K))
