# SPDX-License-Identifier: Apache-2.0
"""The K-th largest of one program's keys, by a radix search over digits of 10 bits.

Each pass counts the digits of the keys still in question and keeps the bin that holds the K-th. The
digits are taken of the range that is left: two or three passes for most rows. Where equal keys are
left of which not all are taken, the search goes on over their places.
"""

import triton
import triton.language as tl

from mla_kernels.topk.triton import ptx
from mla_kernels.topk.triton.ptx import BINS, ROW

BITS = tl.constexpr(10)
# A word that describes an entry: FOUND, 11 bits of keys above it, its number.
FOUND = tl.constexpr(1 << 24)


@triton.jit
def scan_rows(x):
    """Inclusive prefix sums of [R, N] int32 in row-major order; only R sums cross the rows."""
    sums = tl.sum(x, axis=1)
    before = tl.cumsum(sums, axis=0) - sums
    return tl.cumsum(x, axis=1) + before[:, None]


@triton.jit
def find_entry(counts, wanted):
    """The entry of [ROW] counts in which the running sum reaches `wanted`, as a word; 0: none."""
    reach = tl.cumsum(counts, axis=0)
    above = reach - counts
    word = FOUND | (above << 12) | tl.arange(0, ROW)
    return tl.sum(tl.where((above < wanted) & (reach >= wanted), word, 0))


@triton.jit
def count_digits(counts, digits, counted, counters, PTX: tl.constexpr):
    """Adds digits (0 to BINS - 1) to the [BINS] counts, or to the counters in shared memory."""
    if PTX:  # Triton's own histogram goes through every bin for every key
        ptx.count_in_shared(counters, tl.where(counted, digits, BINS))
    else:
        counts += tl.histogram(digits, BINS, mask=counted)
    return counts


@triton.jit
def find_in_counts(counts, wanted, counters, PTX: tl.constexpr):
    """(keys above the bin in which `wanted` counted digits are reached, keys in it, the bin, -1 if
    fewer were counted; how many were counted). Two steps: which row of ROW bins, which of these.
    """
    if PTX:
        sums = ptx.sums_of_counts(counters)
    else:
        counts = tl.reshape(counts, (ROW, ROW))
        sums = tl.sum(counts, axis=1)
    row = find_entry(sums, wanted)
    above = (row >> 12) & 0x7FF
    if PTX:
        fine = ptx.counts_of_row(counters, row & (ROW - 1))
    else:
        chosen = (tl.arange(0, ROW) == (row & (ROW - 1)))[:, None]
        fine = tl.sum(tl.where(chosen, counts, 0), axis=0)
    word = find_entry(fine, wanted - above)
    above += (word >> 12) & 0x7FF
    inside = tl.sum(tl.where(tl.arange(0, ROW) == (word & (ROW - 1)), fine, 0))
    number = tl.where(row > 0, (row & (ROW - 1)) * ROW + (word & (ROW - 1)), -1)
    return above, inside, number, tl.sum(sums)


@triton.jit
def digit_shift(span):
    """Shift that leaves at most BITS bits of a number up to `span`."""
    # Its exponent as a float is the highest bit, or one more by rounding, which does no harm.
    highest = (span.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127
    return tl.maximum(highest + 1 - BITS, 0).to(tl.uint32)


@triton.jit
def find_threshold(keys, floor, top, counters, K: tl.constexpr, N: tl.constexpr, PTX: tl.constexpr):
    """(keys, threshold, bound, top, total): the top K of the N keys are those that reach
    `threshold` after the call, `total` of them; K reached `bound` before it, or it is 1.

    floor     keys below it do not count; at least 1
    top       the largest key; 0: not known
    counters  from `ptx.reserve_counters`
    """
    if top == 0:
        top = tl.max(keys)
    if PTX:
        ptx.clear_counters(counters)
    lo = floor
    hi = tl.maximum(top, floor)
    bound = floor
    shift = digit_shift(hi - lo)
    wanted = K
    total = K
    # Always true, but not a constant: the compiler would write the first pass out twice.
    searching = hi < 0xFFFFFFFF
    while searching:
        rest = hi - keys  # bin 0 is the highest
        counts = count_digits(
            tl.zeros((BINS,), tl.int32),
            (rest >> shift).to(tl.int32),
            rest <= hi - lo,
            counters,
            PTX,
        )
        above, inside, number, count = find_in_counts(counts, wanted, counters, PTX)
        if PTX:
            counters = ptx.other_counters(counters)
        if number >= 0:
            wanted -= above
            hi -= number.to(tl.uint32) << shift
            lo = hi - tl.minimum(hi - lo, (tl.full((), 1, tl.uint32) << shift) - 1)
            bound = tl.where(hi > N, lo, bound)  # no key is as small as a place
            searching = inside > wanted
            if searching & (shift == 0):  # equal keys: the first ones
                place = N - tl.arange(0, N).to(tl.uint32)
                keys = tl.where(keys > hi, 0xFFFFFFFF, tl.where(keys == hi, place, 0))
                lo = (hi * 0 + 1).to(tl.uint32)
                hi = lo + (N - 1)
                shift = digit_shift(hi)
            else:
                shift = tl.where(shift > BITS, shift - BITS, 0)
        else:  # fewer than K in all: every one of them
            total = count
            bound = (lo * 0 + 1).to(tl.uint32)
            searching = False
    return keys, lo, bound, top, total
