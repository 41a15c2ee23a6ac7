# SPDX-License-Identifier: Apache-2.0
"""Exact top-k of few rows: each row is shared by programs that all run at once, each holding a
chunk of it in registers.

A radix search over digits of 11, 11 and 10 bits: every program adds its counts of a digit to the
row's counts in global memory and reads the sums. How many keys there are to count is known, so the
sums themselves tell when all programs have added theirs: no barrier. In the end each program tells
the others how many keys it has above the K-th largest and equal to it, and knows from theirs where
its own go. What is written does not depend on the order in which anything happens.

Of 8192 keys and more an SM holds one program, so halves of two such launches could fill a device
and wait for ever. A cooperative launch starts with all its programs or not at all.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from mla_kernels.topk import plan
from mla_kernels.topk.triton import ptx
from mla_kernels.topk.triton.keys import ordered_key
from mla_kernels.topk.triton.select import readable_end, row_length
from mla_kernels.topk.triton.threshold import scan_rows

DIGITS = tl.constexpr(plan.SPREAD_DIGITS)
WORDS = tl.constexpr(plan.SPREAD_WORDS)
ROWS = tl.constexpr(32)  # of DIGITS / 32 digits
FIRST_SHIFT = tl.constexpr(21)
SECOND_SHIFT = tl.constexpr(10)
# The steps: three digits, the counts of what is taken, the output.
COUNTS = tl.constexpr(3)
OUTPUT = tl.constexpr(4)
# A program's word: FOUND, 15 bits of keys above the threshold, 15 bits of keys equal to it.
FOUND = tl.constexpr(1 << 30)
UNLIMITED = tl.constexpr(1 << 24)


@triton.jit
def clear_state_kernel(
    state_ptr,  # [T, WORDS] int32, written
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Zeroes what the programs of `spread_topk_kernel` add to."""
    if PDL:
        # Waits before it lets the next kernel start: that one may read its scores at once.
        gdc_wait()
        gdc_launch_dependents()
    i = tl.arange(0, BLOCK)
    tl.store(state_ptr + tl.program_id(0).to(tl.int64) * WORDS + i, 0, mask=i < WORDS)


@triton.jit
def local_counts(digits, counted, counters, step, PTX: tl.constexpr):
    """[32, DIGITS / 32] counts of one program's digits."""
    if PTX:
        return ptx.count_wide(counters, step, tl.where(counted, digits, DIGITS))
    else:
        return tl.reshape(tl.histogram(digits, DIGITS, mask=counted), (ROWS, DIGITS // ROWS))


@triton.jit
def shared_sums(counts, counters, PTX: tl.constexpr):
    """[32] sums of the rows of counts, in every warp; the counts become readable by row."""
    if PTX:
        return ptx.share_wide(counters, counts)
    else:
        return tl.sum(counts, axis=1)


@triton.jit
def find_digit(counts, sums, wanted, counters, PTX: tl.constexpr):
    """The digit at which the running sum reaches `wanted`: (counts above it, its count, the digit;
    -1 if it is not reached). Which row of 64, which pair of its digits, which of the two."""
    entry = tl.arange(0, ROWS)
    reach = tl.cumsum(sums, axis=0)
    above = reach - sums
    hit = (above < wanted) & (reach >= wanted)
    word = tl.sum(tl.where(hit, FOUND | (above << 12) | entry, 0))
    row = word & (ROWS - 1)
    before = (word >> 12) & 0x7FF
    if PTX:
        a, b = ptx.pairs_of_row(counters, row)
    else:
        chosen = tl.sum(tl.where((entry == row)[:, None], counts, 0), axis=0)
        a, b = tl.split(tl.reshape(chosen, (ROWS, 2)))
    pair = a + b
    reach = tl.cumsum(pair, axis=0)
    above = before + reach - pair
    hit = (above < wanted) & (before + reach >= wanted)
    first = above + a >= wanted
    found = tl.where(first, (above << 12) | (2 * entry), ((above + a) << 12) | (2 * entry + 1))
    found = tl.sum(tl.where(hit, found, 0))
    inside = tl.sum(tl.where(hit, tl.where(first, a, b), 0))
    number = tl.where(word > 0, row * (DIGITS // ROWS) + (found & 0x3F), -1)
    return found >> 12, inside, number


@triton.jit
def spread_topk_kernel(
    scores_ptr,  # [T, width] fp32
    lengths_ptr,  # [T] int32
    state_ptr,  # [T, WORDS] int32, zero before
    out_ptr,  # [T, K] int32, written
    width,
    stride_scores,
    stride_out,
    K: tl.constexpr,
    K_POW2: tl.constexpr,
    CHUNK: tl.constexpr,
    PARTS: tl.constexpr,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
    HAS_LENGTHS: tl.constexpr,
    ALIGNED: tl.constexpr,
    PTX: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (part, row) holds CHUNK keys. All that are not past a row's end must be resident at
    once, or a launch each takes the steps FIRST..LAST, of which those before FIRST are read back.
    """
    part = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    # Not by way of the L1, nor the scores: this may run before the wait that would make the L1
    # forget, and programs that saw different lengths would wait for each other for ever.
    n = row_length(lengths_ptr, row, width, HAS_LENGTHS, ".cg")
    parts = tl.maximum(tl.cdiv(n, CHUNK), 1)
    if part >= parts:
        return
    i = part * CHUNK + tl.arange(0, CHUNK)
    scores = tl.load(
        scores_ptr + row * stride_scores + i,
        mask=i < readable_end(n, ALIGNED),
        other=0.0,
        cache_modifier=".cg",
    )
    keys = ordered_key(scores, i < n)
    counters = 0
    if PTX:
        counters = ptx.wide_counters(FIRST)
    if PDL:
        gdc_wait()  # for the zeroes
    state_ptr += row * WORDS
    bins = tl.arange(0, ROWS)[:, None] * (DIGITS // ROWS) + tl.arange(0, DIGITS // ROWS)[None, :]

    # The K-th largest key is the wanted-th of those in lo..hi, of which there are `expected`.
    lo = (n * 0).to(tl.uint32)
    hi = lo - 1
    shift = lo + FIRST_SHIFT
    wanted = n * 0 + K
    # Those past the end count, too: as keys that cannot be selected.
    expected = parts * CHUNK
    step = n * 0
    searching = n >= 0
    while searching:
        digits_ptr = state_ptr + step * DIGITS + bins
        if step >= FIRST:
            rest = hi - keys  # digit 0 is the highest
            digits = (rest >> shift).to(tl.int32)
            counts = local_counts(digits, rest <= hi - lo, counters, step, PTX)
            tl.atomic_add(digits_ptr, counts, mask=counts != 0, sem="relaxed")
        if step < LAST:
            counts = tl.load(digits_ptr, volatile=True)
            sums = shared_sums(counts, counters, PTX)
            while tl.sum(sums) != expected:
                tl.debug_barrier()
                counts = tl.load(digits_ptr, volatile=True)
                sums = shared_sums(counts, counters, PTX)
            above, expected, number = find_digit(counts, sums, wanted, counters, PTX)
            # No key that can be selected has the last first digit: fewer than K can.
            if (number < 0) | ((step == 0) & (number == DIGITS - 1)):
                lo = (n * 0 + 1).to(tl.uint32)
                wanted = n * 0 + UNLIMITED
                searching = False
            else:
                wanted -= above
                hi -= number.to(tl.uint32) << shift
                lo = hi - tl.minimum(hi - lo, (tl.full((), 1, tl.uint32) << shift) - 1)
                searching = (expected != wanted) & (shift > 0)
                shift = tl.where(step == 0, SECOND_SHIFT, 0).to(tl.uint32)
        else:
            searching = False
        step += 1

    if LAST >= COUNTS:
        # All above hi are taken, and the first `wanted` of lo..hi.
        marks = tl.where(keys > hi, 1, tl.where(keys >= lo, 1 << 16, 0))
        ranks = scan_rows(tl.reshape(marks, (CHUNK // 128, 128)))
        words_ptr = state_ptr + 3 * DIGITS
        if FIRST <= COUNTS:
            own = tl.sum(tl.sum(tl.reshape(marks, (CHUNK // 128, 128)), axis=1), axis=0)
            word = FOUND | ((own & 0xFFFF) << 15) | (own >> 16)
            tl.atomic_xchg(words_ptr + part, word, sem="relaxed")
        if LAST >= OUTPUT:
            other = tl.arange(0, PARTS)
            words = tl.load(words_ptr + other, mask=other < parts, other=FOUND, volatile=True)
            while tl.min(words) == 0:
                words = tl.load(words_ptr + other, mask=other < parts, other=FOUND, volatile=True)
            above = (words >> 15) & 0x7FFF
            equal = words & 0x7FFF
            equal_before = tl.sum(tl.where(other < part, equal, 0))
            start = tl.sum(tl.where(other < part, above, 0)) + tl.minimum(equal_before, wanted)
            allowed = tl.minimum(tl.maximum(wanted - equal_before, 0), CHUNK)
            out_ptr += row * stride_out
            rank = tl.reshape(ranks, (CHUNK,))
            taken = (keys > hi) | ((keys >= lo) & ((rank >> 16) <= allowed))
            position = start + (rank & 0xFFFF) + tl.minimum(rank >> 16, allowed) - 1
            if PTX:
                ptx.scatter(out_ptr, tl.where(taken, position, -1), ptx.again(i))
            else:
                tl.store(out_ptr + position, i, mask=taken)
            if part == parts - 1:
                total = tl.sum(above) + tl.minimum(tl.sum(equal), wanted)
                pad = tl.arange(0, K_POW2)
                tl.store(out_ptr + pad, -1, mask=(pad >= total) & (pad < K))
