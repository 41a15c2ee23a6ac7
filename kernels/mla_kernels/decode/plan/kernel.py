# SPDX-License-Identifier: Apache-2.0
"""The plan kernel: from seq_lens, on the device, which program reads which tokens.

Work is counted in tiles of PLAN_TILE tokens. Request i with n_i tiles costs n_i + OVERHEAD (0 when
it is empty); c_i is the exclusive sum of the costs. Its tile j sits at position c_i + OVERHEAD + j
of one line, and part p owns the positions [p * pay, (p + 1) * pay) with pay = ceil(total / parts):
no part has more than pay of cost, no range is empty, and who owns what follows from c alone.

That cuts nearly every request, and a cut costs the traffic of its partial results. So if no part
needs to span two requests for hardly more work a part (SLACK tiles, and one more for each SPARE of
its own), none does: each request gets parts of its own, with equal shares, and one that fits a part
is not cut at all.

With chunks (deterministic mode) a part owns the whole chunks whose first tile is in its interval,
and a request is cut at its own chunk boundaries wherever it lies: its result does not depend on the
others.
"""

import triton
import triton.language as tl

PLAN_TILE = 64
# Fields of one row of `parts`: first request, its first tile, last request, its end tile
# (exclusive), index of the first split within its request, the first request's end tile in this
# part. A part without work has last request -1.
PART_FIELDS = 8
# Fields of one row of `requests`: first workspace slot, number of splits (0: empty, 1: whole,
# written by the decode kernel itself), tiles a chunk, c_i.
REQUEST_FIELDS = 4


@triton.jit
def request_costs(lens_ptr, i, B, TILE: tl.constexpr, OVERHEAD: tl.constexpr):
    n = (tl.load(lens_ptr + i, mask=i < B, other=0) + TILE - 1) // TILE
    return n, tl.where(n > 0, n + OVERHEAD, 0)


@triton.jit
def chunk_tiles(n, CHUNK: tl.constexpr, MAX_CHUNKS: tl.constexpr, ROOM: tl.constexpr):
    """Tiles a chunk for a request of n tiles: a function of its own length only.

    Requests too short for 8 chunks get half as many: they come in batches that fill the device,
    where each chunk costs its partial result. One that is longer than the workspace was made for
    gets as many chunks as there is room for: other chunks, but no one else's memory.
    """
    long = tl.maximum(CHUNK, (n + MAX_CHUNKS - 1) // MAX_CHUNKS)
    return tl.maximum(tl.where(n < 8 * CHUNK, 2 * CHUNK, long), (n + ROOM - 1) // ROOM)


@triton.jit
def count_up_to(requests_ptr, x, B):
    """How many requests have c_i <= x, for each x: binary search, c being sorted."""
    low = x * 0
    width = B
    while width > 0:
        half = (width + 1) // 2
        at = low + half - 1
        c = tl.load(requests_ptr + at * 4 + 3, mask=at < B, other=2147483647)
        low = tl.where(c <= x, low + half, low)
        width = width - half
    return low


@triton.jit(do_not_specialize=["B"])
def plan_kernel(
    lens_ptr,  # [B] int32
    parts_ptr,  # [PARTS, 8] int32
    requests_ptr,  # [B, 4] int32
    outgrown_ptr,  # [PARTS, ROW_TILES] int32, made zeros
    B,
    TILE: tl.constexpr,
    PARTS: tl.constexpr,
    PARTS_POW2: tl.constexpr,
    ROW_TILES: tl.constexpr,
    OVERHEAD: tl.constexpr,
    MIN_PAY: tl.constexpr,
    SLACK: tl.constexpr,
    SPARE: tl.constexpr,  # 0: none
    CHUNK: tl.constexpr,  # 0: cut anywhere
    MAX_CHUNKS: tl.constexpr,
    ROOM: tl.constexpr,  # chunks of a request in the workspace
    BLOCK: tl.constexpr,
):
    lane = tl.arange(0, BLOCK)
    total = 0
    for start in range(0, B, BLOCK):
        _n, cost = request_costs(lens_ptr, start + lane, B, TILE, OVERHEAD)
        total += tl.sum(cost, 0)
    pay = tl.maximum((total + PARTS - 1) // PARTS, MIN_PAY)

    # The tiles a part of one request gets, if each request can have parts of its own; else 0.
    share = 0
    if CHUNK == 0:  # noqa: SIM102 - decided at compile time
        if B <= tl.minimum(PARTS, BLOCK):
            n, _cost = request_costs(lens_ptr, lane, B, TILE, OVERHEAD)
            high = pay + SLACK
            if SPARE > 0:
                high += pay // SPARE
            if tl.sum((n + high - 1) // high, 0) <= PARTS:
                low = tl.maximum(pay - OVERHEAD, 1)
                while low < high:
                    middle = (low + high) // 2
                    if tl.sum((n + middle - 1) // middle, 0) <= PARTS:
                        high = middle
                    else:
                        low = middle + 1
                share = low

    # Requests: workspace slots and splits. With shares, c counts parts instead of cost.
    c_next = 0
    slot_next = 0
    whole_next = 0
    for start in range(0, B, BLOCK):
        i = start + lane
        n, cost = request_costs(lens_ptr, i, B, TILE, OVERHEAD)
        c = c_next + tl.cumsum(cost, 0) - cost
        if CHUNK > 0:
            chunk = chunk_tiles(n, CHUNK, MAX_CHUNKS, ROOM)
            splits = (n + chunk - 1) // chunk
        elif share > 0:
            parts = tl.maximum((n + share - 1) // share, 1)
            chunk = tl.maximum((n + parts - 1) // parts, 1)
            splits = (n + chunk - 1) // chunk
            c = tl.cumsum(splits, 0) - splits
        else:
            chunk = n
            splits = tl.where(n > 0, (c + cost - 1) // pay - (c + OVERHEAD) // pay + 1, 0)
        slots = tl.where(splits > 1, splits, 0)
        slot = slot_next + tl.cumsum(slots, 0) - slots
        row = requests_ptr + i * 4
        tl.store(row + 0, slot, mask=i < B)
        tl.store(row + 1, splits, mask=i < B)
        tl.store(row + 2, chunk, mask=i < B)
        tl.store(row + 3, c, mask=i < B)
        c_next += tl.sum(cost, 0)
        slot_next += tl.sum(slots, 0)
        whole_next += tl.sum((splits == 1).to(tl.int32), 0)
    tl.debug_barrier()  # the c stored above is read below by other threads

    # The decode kernel leaves zeros, but an engine that slept has lost the contents of its buffers.
    p = tl.arange(0, PARTS_POW2)
    for row_tile in range(ROW_TILES):
        tl.store(outgrown_ptr + p * ROW_TILES + row_tile, 0, mask=p < PARTS)

    # Parts: the first request that ends past x, the last one whose tiles start before x + pay.
    x = p * pay
    x_end = tl.minimum(x + pay, total)
    if share > 0:
        first = count_up_to(requests_ptr, p, B) - 1
        last = first
        owns = p < slot_next + whole_next
    else:
        first = count_up_to(requests_ptr, x, B) - 1
        last = count_up_to(requests_ptr, x_end - OVERHEAD - 1, B) - 1
        owns = (first <= last) & (x < total)
    ok = owns & (p < PARTS)
    n_first = (tl.load(lens_ptr + first, mask=ok, other=0) + TILE - 1) // TILE
    n_last = (tl.load(lens_ptr + last, mask=ok, other=0) + TILE - 1) // TILE
    start_first = tl.load(requests_ptr + first * 4 + 3, mask=ok, other=0) + OVERHEAD
    start_last = tl.load(requests_ptr + last * 4 + 3, mask=ok, other=0) + OVERHEAD
    tile = tl.minimum(tl.maximum(x - start_first, 0), n_first)
    end = tl.minimum(tl.maximum(x_end - start_last, 0), n_last)
    if CHUNK > 0:
        chunk_first = chunk_tiles(n_first, CHUNK, MAX_CHUNKS, ROOM)
        chunk_last = chunk_tiles(n_last, CHUNK, MAX_CHUNKS, ROOM)
        split = (tile + chunk_first - 1) // chunk_first
        tile = split * chunk_first
        end = tl.minimum((end + chunk_last - 1) // chunk_last * chunk_last, n_last)
    elif share > 0:
        chunk = tl.load(requests_ptr + first * 4 + 2, mask=ok, other=0)
        split = p - tl.load(requests_ptr + first * 4 + 3, mask=ok, other=0)
        tile = split * chunk
        end = tl.minimum(tile + chunk, n_last)
    else:
        split = tl.where(tile > 0, p - start_first // pay, 0)
    row = parts_ptr + p * 8
    tl.store(row + 0, tl.where(owns, first, 0), mask=p < PARTS)
    tl.store(row + 1, tile, mask=p < PARTS)
    tl.store(row + 2, tl.where(owns, last, -1), mask=p < PARTS)
    tl.store(row + 3, end, mask=p < PARTS)
    tl.store(row + 4, split, mask=p < PARTS)
    tl.store(row + 5, tl.where(first == last, end, n_first), mask=p < PARTS)
