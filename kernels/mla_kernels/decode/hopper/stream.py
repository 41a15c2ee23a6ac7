# SPDX-License-Identifier: Apache-2.0
"""Walking a part of the plan: segments of cache tiles, and the stream of TMA loads that runs ahead.

A segment is an unbroken range of tiles [lo, hi) of one request, folded into one accumulator. Each
is loaded as hi - lo + 1 tiles: its query tile first, through the same rings as the cache tiles, so
that the rings stay full across the border between two requests.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from mla_kernels.decode.hopper.layouts import BLOCK, HALF, PASS_128, QUERY, QUERY_TILE, ROPE
from mla_kernels.triton_common.gluon_compat import aggregate, reinterpret, tma_load

LATENT = gl.constexpr(2 * HALF.value)


@gluon.jit
def ring_next(slot, phase, SIZE: gl.constexpr):
    """The next slot of a ring and the parity that its barrier is waited for with."""
    if SIZE == 1:
        return slot, phase ^ 1
    slot = slot + 1
    wrap = slot == SIZE
    return gl.where(wrap, 0, slot), gl.where(wrap, phase ^ 1, phase)


@gluon.jit
def ring_step(slot, SIZE: gl.constexpr):
    """The next slot of a ring whose barrier is not waited for here."""
    return gl.where(slot + 1 == SIZE, 0, slot + 1)


@gluon.jit
def ring_previous(slot, SIZE: gl.constexpr):
    return gl.where(slot == 0, SIZE - 1, slot - 1)


@aggregate
class Part:
    """This program's share of the plan (decode/plan/launcher.py) and what it is read with: requests
    up to `last`, of which the last one up to tile `last_end`."""

    last: gl.tensor
    last_end: gl.tensor
    seq_lens: gl.tensor
    requests: gl.tensor
    table: gl.tensor
    table_stride: gl.tensor
    CHUNKED: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, last, last_end, seq_lens, requests, table, table_stride, CHUNKED):
        self.last = last
        self.last_end = last_end
        self.seq_lens = seq_lens
        self.requests = requests
        self.table = table
        self.table_stride = table_stride
        self.CHUNKED = gl.constexpr(CHUNKED)


@gluon.jit
def request_end(plan, request):
    """Number of the tile past this part's share of a request (0: nothing)."""
    tiles = (gl.load(plan.seq_lens + gl.minimum(request, plan.last)) + BLOCK - 1) // BLOCK
    return gl.where(request >= plan.last, gl.minimum(plan.last_end, tiles), tiles)


@gluon.jit
def next_request(plan, request):
    request = request + 1
    end = request_end(plan, request)
    while (request <= plan.last) & (end <= 0):
        request = request + 1
        end = request_end(plan, request)
    return request, end


@gluon.jit
def segment_end(plan, request, lo, end):
    """Where the segment from tile `lo` stops: at the end of its chunk, or of the part's share."""
    if plan.CHUNKED:
        chunk = gl.load(plan.requests + gl.minimum(request, plan.last) * 4 + 2)
        return gl.minimum(lo + chunk, end)
    else:
        return end


@gluon.jit
def next_segment(plan, request, hi, end):
    """(request, lo, hi, end) of the segment after the one that stops at tile `hi`."""
    lo = hi + 0
    if plan.CHUNKED:
        if lo >= end:
            request, end = next_request(plan, request)
            lo = lo * 0
    else:
        request, end = next_request(plan, request)
        lo = lo * 0
    return request, lo, segment_end(plan, request, lo, end), end


@gluon.jit
def step_on(request, split, after, after_lo, after_hi, after_end):
    """(request, lo, hi, end, split) of a loop that goes on with the segment `after`, of
    `next_segment`: the next one of its request, or the first of another."""
    # Copies: a loop does not carry one value under two names.
    return (
        after + 0, after_lo + 0, after_hi + 0, after_end + 0,
        gl.where(after == request, split + 1, 0),
    )  # fmt: skip


@aggregate
class Start:
    """This program's row of the plan (decode/plan/kernel.py): read once, for all warpgroups,
    while the barriers are made."""

    request: gl.tensor
    lo: gl.tensor
    last: gl.tensor
    last_end: gl.tensor
    split: gl.tensor
    end: gl.tensor

    @gluon.constexpr_function
    def __init__(self, request, lo, last, last_end, split, end):
        self.request = request
        self.lo = lo
        self.last = last
        self.last_end = last_end
        self.split = split
        self.end = end


@gluon.jit
def read_start(parts):
    row = parts + gl.program_id(1) * 8
    return Start(
        gl.load(row + 0), gl.load(row + 1), gl.load(row + 2),
        gl.load(row + 3), gl.load(row + 4), gl.load(row + 5),
    )  # fmt: skip


@gluon.jit
def start_segment(start, seq_lens, requests, table, table_stride, CHUNKED: gl.constexpr):
    """(part, request, lo, hi, end, split) of this program."""
    # A part without work says last = -1; reads past the end below are clamped to request `last`.
    request = gl.where(start.last < 0, 1, start.request)
    last = gl.maximum(start.last, 0)
    lo = start.lo + 0
    split = start.split + 0
    end = start.end + 0
    plan = Part(last, start.last_end, seq_lens, requests, table, table_stride, CHUNKED)
    if (request <= last) & (lo >= end):
        request, end = next_request(plan, request)
        lo = lo * 0
        split = split * 0
    return plan, request, lo, segment_end(plan, request, lo, end), end, split


@aggregate
class Cursor:
    """A place in the tile stream of one ring: `tile` of `request`, or the segment's query tile
    when `tile == query` (that is lo - 1). `page` is the cache page of the tile."""

    request: gl.tensor
    tile: gl.tensor
    hi: gl.tensor
    end: gl.tensor
    query: gl.tensor
    page: gl.tensor

    @gluon.constexpr_function
    def __init__(self, request, tile, hi, end, query, page):
        self.request = request
        self.tile = tile
        self.hi = hi
        self.end = end
        self.query = query
        self.page = page


@gluon.jit
def stream_start(request, lo, hi, end):
    return Cursor(request + 0, lo - 1, hi + 0, end + 0, lo - 1, gl.to_tensor(0))


@gluon.jit
def load_query(q_desc, request, COL: gl.constexpr, full, tile, ok):
    """Ask for a request's rows of this program, from column COL on; rows past its last are zero."""
    box = reinterpret(tile, gl.bfloat16, [1, tile.shape[0], tile.shape[1]], QUERY_TILE)
    tma_load(q_desc, [request, gl.program_id(0) * BLOCK, COL], full, box, pred=ok)


@gluon.jit
def take_query(a, b, r, q_shared):
    """A query tile that has come in a ring's places `a`, `b` and `r`: to registers, but for 128
    columns, which go to `q_shared`. Returns columns 0 to 255, 256 to 383, and those of rope."""
    q_a = a.load(QUERY)
    q_b = b.slice(0, 128, dim=1).load(QUERY)
    q_rope = r.load(QUERY)
    q_shared.store(b.slice(128, 128, dim=1).load(PASS_128))
    fence_async_shared()
    return q_a, q_b, q_rope


@gluon.jit
def load_next(
    c, plan, q_desc, q_rope_desc, kv_desc, kv_rope_desc, COL: gl.constexpr, ring, full, ring_r, slot
):  # fmt: skip
    """Fill `slot` of a ring with the HALF columns from COL on of the cursor's tile, and step on. Of
    the upper half: the same slot of ring_r with the tile's rope columns too, on the same barrier.
    """
    ok = c.request <= plan.last
    WITH_ROPE: gl.constexpr = COL > 0
    COLUMNS: gl.constexpr = HALF + (ROPE if WITH_ROPE else 0)
    mbarrier.expect(full.index(slot), BLOCK * COLUMNS * 2, pred=ok)
    if c.tile == c.query:
        load_query(q_desc, c.request, COL, full.index(slot), ring.index(slot), ok)
        if WITH_ROPE:
            load_query(q_rope_desc, c.request, 0, full.index(slot), ring_r.index(slot), ok)
    else:
        row = c.page * BLOCK
        tma_load(kv_desc, [row, COL], full.index(slot), ring.index(slot), pred=ok)
        if WITH_ROPE:
            tma_load(kv_rope_desc, [row, LATENT], full.index(slot), ring_r.index(slot), pred=ok)

    request = c.request
    tile = c.tile + 1
    hi = c.hi
    end = c.end
    query = c.query
    if tile >= hi:
        request, lo, hi, end = next_segment(plan, request, hi, end)
        tile = lo - 1
        query = lo - 1
    row = plan.table + gl.minimum(request, plan.last).to(gl.int64) * plan.table_stride
    page = gl.load(row + gl.maximum(tile, 0))
    return Cursor(request, tile, hi, end, query, page)
