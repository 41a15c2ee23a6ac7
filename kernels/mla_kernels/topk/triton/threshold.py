# SPDX-License-Identifier: Apache-2.0
"""The K-th largest of one program's keys, by a radix search over digits of 10 bits.

Each pass counts the digits of the keys still in question and keeps the bin that holds the K-th. The
digits are taken of the range that is left, so two or three passes do for most rows. Where equal
keys are left of which not all are taken, the search goes on over their places.
"""

import triton
import triton.language as tl

from mla_kernels.topk.triton.ptx import count_in_shared

BITS = tl.constexpr(10)
BINS = tl.constexpr(1024)
# A word that describes a bin: FOUND, 11 bits of keys above it, EXACT, its number.
FOUND = tl.constexpr(1 << 24)
EXACT = tl.constexpr(1 << 11)


@triton.jit
def bin_numbers():
    return tl.arange(0, BINS // 32)[:, None] * 32 + tl.arange(0, 32)[None, :]


@triton.jit
def count_digits(digits, counted, PTX: tl.constexpr):
    """[BINS / 32, 32] int32: how many of the `counted` digits have each value below BINS."""
    if PTX:  # Triton's own histogram goes through every bin for every key
        return count_in_shared(tl.where(counted, digits, BINS), bin_numbers())
    return tl.reshape(tl.histogram(digits, BINS, mask=counted), (BINS // 32, 32))


@triton.jit
def scan_rows(x):
    """Inclusive prefix sums of [R, N] int32 in row-major order; only R sums cross the rows."""
    sums = tl.sum(x, axis=1)
    before = tl.cumsum(sums, axis=0) - sums
    return tl.cumsum(x, axis=1) + before[:, None]


@triton.jit
def digit_shift(span):
    """Shift that leaves at most BITS bits of a number up to `span`."""
    # Its exponent as a float is the highest bit, or one more by rounding, which does no harm.
    highest = (span.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127
    return tl.maximum(highest + 1 - BITS, 0).to(tl.uint32)


@triton.jit
def find_threshold(keys, floor, K: tl.constexpr, N: tl.constexpr, PTX: tl.constexpr):
    """(keys, threshold, bound, total): the top K of the N keys are those that reach `threshold`
    after the call, `total` of them. Keys below `floor` do not count, it is at least 1. At least
    `total` keys reached `bound` before the call.
    """
    lo = floor
    hi = tl.maximum(tl.max(keys), floor)
    bound = floor
    shift = digit_shift(hi - lo)
    wanted = K
    total = K
    by_place = False
    searching = True
    while searching:
        rest = hi - keys  # bin 0 is the highest
        counts = count_digits((rest >> shift).to(tl.int32), rest <= hi - lo, PTX)
        reach = scan_rows(counts)
        above = reach - counts
        word = FOUND | (above << 12) | tl.where(reach == wanted, EXACT, 0) | bin_numbers()
        word = tl.sum(tl.ravel(tl.where((above < wanted) & (reach >= wanted), word, 0)))
        if word > 0:
            wanted -= (word >> 12) & 0x7FF
            hi -= (word & (BINS - 1)).to(tl.uint32) << shift
            lo = hi - tl.minimum(hi - lo, (tl.full((), 1, tl.uint32) << shift) - 1)
            bound = bound if by_place else lo
            searching = (word & EXACT) == 0
            if searching & (shift == 0):  # equal keys: the first ones
                place = N - tl.arange(0, N).to(tl.uint32)
                keys = tl.where(keys > hi, 0xFFFFFFFF, tl.where(keys == hi, place, 0))
                by_place = True
                lo = (hi * 0 + 1).to(tl.uint32)
                hi = lo + (N - 1)
                shift = digit_shift(hi)
            else:
                shift = tl.where(shift > BITS, shift - BITS, 0)
        else:  # fewer than K in all: every one of them
            total = tl.max(tl.ravel(reach))
            searching = False
    return keys, lo, bound, total
