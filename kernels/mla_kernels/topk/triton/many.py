# SPDX-License-Identifier: Apache-2.0
"""Exact top-k of more rows than there are SMs: a program a row, which is read twice.

First for the largest score of each of ROOM groups; scores that are ROOM apart share one. K of these
reach the K-th largest of them, so at least K scores of the row do. Then the scores that reach such
a floor are listed, and only they are searched: about 1.3 K of independent scores, however long the
row. Where more do than the list has room for (of equal scores, say), counts of the row's digits
raise the floor. No program holds more than ROOM keys, so an SM has room for several.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from mla_kernels.topk import plan
from mla_kernels.topk.triton import ptx
from mla_kernels.topk.triton.keys import LOWEST, ordered_key, score_of_key
from mla_kernels.topk.triton.ptx import BINS
from mla_kernels.topk.triton.select import row_length
from mla_kernels.topk.triton.threshold import (
    BITS,
    count_digits,
    digit_shift,
    find_in_counts,
    find_threshold,
    scan_rows,
)

WORD = tl.constexpr(plan.BITMAP_WORD)
HALF = tl.constexpr(plan.BITMAP_WORD // 2)
LAST_PLACE = tl.constexpr(0x7FFFFFFF)


@triton.jit
def load_scores(scores_ptr, start, n, TILE: tl.constexpr):
    """[TILE] scores from `start` on; -inf from n on."""
    i = start + tl.arange(0, TILE)
    if start + TILE <= n:  # without a mask it is a vector load
        scores = tl.load(scores_ptr + i)
    else:
        scores = tl.load(scores_ptr + i, mask=i < n, other=float("-inf"))
    return scores


@triton.jit
def group_maxima(scores_ptr, n, GROUPS: tl.constexpr):
    """[GROUPS] largest of the scores that are GROUPS apart; NaN is passed over."""
    largest = tl.full((GROUPS,), float("-inf"), tl.float32)
    for start in range(0, n, GROUPS):
        largest = tl.maximum(largest, load_scores(scores_ptr, start, n, GROUPS))
    return largest


@triton.jit
def find_floor(scores, counters, K: tl.constexpr, PTX: tl.constexpr):
    """A score that at least K of them reach and not many more, by bins of equal width between the
    smallest and the largest; -FLT_MAX where fewer than K can be selected."""
    if PTX:
        ptx.clear_counters(counters)
    selectable = scores > float("-inf")
    lo = tl.min(tl.where(selectable, scores, float("inf")))
    hi = tl.max(scores)
    wanted = K
    searching = lo <= hi
    found = lo
    while searching:
        counted = (scores >= lo) & (scores <= hi)
        # Bin 0 is the highest. Infinities make it NaN, which is bin 0, too: no order is lost.
        bin = ((hi - scores) * ((BINS - 1) / (hi - lo))).to(tl.int32)
        bin = tl.maximum(tl.minimum(bin, BINS - 1), 0)
        counts = count_digits(tl.zeros((BINS,), tl.int32), bin, counted, counters, PTX)
        above, inside, number, _ = find_in_counts(counts, wanted, counters, PTX)
        if PTX:
            counters = ptx.other_counters(counters)
        if number < 0:
            searching = False
            found = tl.minimum(lo, -3.4028234663852886e38)  # lo may be inf
        else:
            wanted -= above
            here = counted & (bin == number)
            found = tl.min(tl.where(here, scores, float("inf")))
            top = tl.max(tl.where(here, scores, float("-inf")))
            # Again in this bin while it holds many, unless it holds all.
            searching = (inside - wanted > K // 16) & ((found > lo) | (top < hi))
            lo = found
            hi = top
    return found


@triton.jit
def mark(scores_ptr, bitmap_ptr, n, floor, above, last, TILE: tl.constexpr):
    """Sets the bits of the scores that reach `floor`; behind place `last` of those that reach
    `above`, the next higher score."""
    words = tl.arange(0, TILE // WORD)
    bit = tl.arange(0, WORD)[None, :]
    tiles = tl.cdiv(n, TILE)
    for tile in range(tiles):
        start = (tiles - 1 - tile) * TILE  # from the end, which the L1 still has
        scores = tl.reshape(load_scores(scores_ptr, start, n, TILE), (TILE // WORD, WORD))
        bits = tl.where(scores >= tl.where(start > last, above, floor), 1 << bit, 0)
        tl.store(bitmap_ptr + start // WORD + words, tl.sum(bits, axis=1))
    if last < n:  # the one tile of which a part is behind it
        start = last // TILE * TILE
        tl.debug_barrier()
        scores = tl.reshape(load_scores(scores_ptr, start, n, TILE), (TILE // WORD, WORD))
        place = start + words[:, None] * WORD + bit
        bits = tl.where(scores >= tl.where(place > last, above, floor), 1 << bit, 0)
        tl.store(bitmap_ptr + start // WORD + words, tl.sum(bits, axis=1))


@triton.jit
def list_marked(
    bitmap_ptr, list_at, n, ROOM: tl.constexpr, HALVES: tl.constexpr, PTX: tl.constexpr
):
    """Lists the places of the bits that are set, in order, at most ROOM. Returns how many are."""
    listed = n * 0
    num_halves = tl.cdiv(n, HALF)
    for first in range(0, num_halves, HALVES):
        half = first + tl.arange(0, HALVES)
        bits = tl.load(bitmap_ptr + half, mask=half < num_halves, other=0).to(tl.int32) & 0xFFFF
        if PTX:
            count = ptx.popcount(bits)
            rank = tl.reshape(scan_rows(tl.reshape(count, (HALVES // 128, 128))), (HALVES,))
            ptx.list_bits(list_at, listed + rank - count, bits, half * HALF, ROOM)
        else:
            each = (bits[:, None] >> tl.arange(0, HALF)[None, :]) & 1
            count = tl.sum(each, axis=1)
            at = listed + scan_rows(each) - 1
            place = half[:, None] * HALF + tl.arange(0, HALF)[None, :]
            tl.store(list_at + at, place, mask=(each == 1) & (at < ROOM))
        listed += tl.sum(count)
    return listed


@triton.jit
def read_list(list_at, slot, listed, PTX: tl.constexpr):
    """The places in slots of the list; anything where not `listed`."""
    if PTX:
        return ptx.read(list_at + slot * 4)
    else:
        return tl.load(list_at + slot, mask=listed, other=0)


@triton.jit
def raise_floor(
    scores_ptr,
    n,
    floor,
    counters,
    K: tl.constexpr,
    ROOM: tl.constexpr,
    TILE: tl.constexpr,
    PTX: tl.constexpr,
):
    """(floor, last): a key that at least K and at most ROOM of a row reach, of those equal to it
    only the ones up to place `last`. The floor as it was where fewer than K reach it."""
    last = n * 0 + LAST_PLACE
    # Most often too many are equal to the floor.
    higher = n * 0
    for start in range(0, n, TILE):
        scores = load_scores(scores_ptr, start, n, TILE)
        higher += tl.sum((scores > score_of_key(floor)).to(tl.int32))
    if higher < K:
        last = place_of(scores_ptr, n, floor, K - higher, TILE)
    if PTX:
        ptx.clear_counters(counters)
    lo = floor
    hi = lo * 0 + 0xFFFFFFFF
    shift = digit_shift(hi - lo)
    wanted = n * 0 + K
    searching = higher >= K
    while searching:
        counts = tl.zeros((BINS,), tl.int32)
        for start in range(0, n, TILE):
            rest = hi - ordered_key(load_scores(scores_ptr, start, n, TILE))
            counts = count_digits(
                counts, (rest >> shift).to(tl.int32), rest <= hi - lo, counters, PTX
            )
        above, inside, number, _ = find_in_counts(counts, wanted, counters, PTX)
        if PTX:
            counters = ptx.other_counters(counters)
        if number < 0:
            searching = False
        else:
            wanted -= above
            hi -= number.to(tl.uint32) << shift
            lo = hi - tl.minimum(hi - lo, (tl.full((), 1, tl.uint32) << shift) - 1)
            searching = K - wanted + inside > ROOM
            if searching & (shift == 0):  # equal scores: the first ones
                searching = False
                last = place_of(scores_ptr, n, lo, wanted, TILE)
            shift = tl.where(shift > BITS, shift - BITS, 0)
    return lo, last


@triton.jit
def place_of(scores_ptr, n, key, wanted, TILE: tl.constexpr):
    """Where the wanted-th score with that key is."""
    place = n * 0 - 1
    seen = n * 0
    for start in range(0, n, TILE):
        equal = ordered_key(load_scores(scores_ptr, start, n, TILE)) == key
        each = tl.reshape(equal.to(tl.int32), (TILE // 128, 128))
        counted = equal & (seen + tl.reshape(scan_rows(each), (TILE,)) <= wanted)
        place = tl.maximum(place, tl.max(tl.where(counted, start + tl.arange(0, TILE), -1)))
        seen += tl.sum(tl.sum(each, axis=1), axis=0)
    return place


@triton.jit
def many_rows_kernel(
    scores_ptr,  # [T, width] fp32
    lengths_ptr,  # [T] int32
    bitmap_ptr,  # [T, >= width / 32, a multiple of TILE / 32] int32, written
    list_ptr,  # [T, ROOM] int32, written
    out_ptr,  # [T, K] int32, written
    width,
    stride_scores,
    stride_bitmap,
    stride_out,
    K: tl.constexpr,
    K_POW2: tl.constexpr,
    ROOM: tl.constexpr,
    TILE: tl.constexpr,
    HALVES: tl.constexpr,
    HAS_LENGTHS: tl.constexpr,
    PTX: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row a program."""
    if PDL:
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    n = row_length(lengths_ptr, row, width, HAS_LENGTHS)
    scores_ptr += row * stride_scores
    out_ptr += row * stride_out

    counters = 0
    list_at = list_ptr
    if PTX:
        counters = ptx.reserve_counters()
        list_at = ptx.reserve_list()
    else:
        list_at += row * ROOM
    slot = tl.arange(0, ROOM)
    places = slot
    floor = (n * 0 + LOWEST).to(tl.uint32)
    end = n
    if n > ROOM:
        bitmap_ptr += row * stride_bitmap
        maxima = group_maxima(scores_ptr, n, ROOM)
        floor = ordered_key(find_floor(maxima, counters, K, PTX))
        last = n * 0 + LAST_PLACE
        too_low = n < 0
        while end > ROOM:
            if too_low:
                floor, last = raise_floor(scores_ptr, n, floor, counters, K, ROOM, TILE, PTX)
            reached, above = score_of_key(floor), score_of_key(floor + 1)
            mark(scores_ptr, bitmap_ptr, n, reached, above, last, TILE)
            tl.debug_barrier()  # the bitmap
            halves_ptr = bitmap_ptr.to(tl.pointer_type(tl.int16))
            end = list_marked(halves_ptr, list_at, n, ROOM, HALVES, PTX)
            tl.debug_barrier()  # the list
            too_low = n > 0
        places = read_list(list_at, slot, slot < end, PTX)
    scores = tl.load(scores_ptr + places, mask=slot < end, other=float("-inf"))
    keys, threshold, _, _, total = find_threshold(
        ordered_key(scores), floor, floor * 0, counters, K, ROOM, PTX
    )
    taken = keys >= threshold
    # Rows of 128, which a warp holds side by side.
    ranks = scan_rows(tl.reshape(taken.to(tl.int32), (ROOM // 128, 128)))
    position = tl.where(taken, tl.reshape(ranks, (ROOM,)) - 1, -1)
    if PTX:
        slot = ptx.again(slot)
    places = slot
    if n > ROOM:
        places = read_list(list_at, slot, taken, PTX)
    pad = tl.arange(0, K_POW2)
    if PTX:  # in shared memory first, so that the output is written in whole lines
        tl.debug_barrier()  # the places, before others take their room
        ptx.write_where(list_at, position, places)
        tl.debug_barrier()
        places = ptx.read(list_at + pad * 4)
        tl.store(out_ptr + pad, tl.where(pad < total, places, -1), mask=pad < K)
    else:
        tl.store(out_ptr + position, places, mask=taken)
        tl.store(out_ptr + pad, -1, mask=(pad >= total) & (pad < K))
