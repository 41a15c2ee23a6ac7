# SPDX-License-Identifier: Apache-2.0
"""One stream of tiles for all tokens of a program (bf16 rows, tokens in one range or in shares).

A program is one tile of heads, program_id(1), and some tokens (walk.py). A token's items
are its query tile, which TMA brings, and then its tiles of rows. They go through the rings without
a break, so that the next token's query and first rows are under way while the last tiles of this
one are multiplied.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from mla_kernels.decode.hopper.layouts import BLOCK, HALF, QUERY_TILE, ROPE
from mla_kernels.sparse.hopper.gather import SCANNED
from mla_kernels.sparse.hopper.layouts import GATHER_BF16, IN_EVERY_THREAD, SCAN_BY_WARP
from mla_kernels.sparse.hopper.scales import store_scalar
from mla_kernels.sparse.hopper.values_bf16 import gather_tile
from mla_kernels.sparse.hopper.walk import row_of
from mla_kernels.triton_common.gluon_compat import aggregate, cta_barrier, reinterpret, tma_load

ARRIVALS = gl.constexpr(128)  # at `full`: of each thread's copies
QUERY_AT = gl.constexpr(-(2**30))  # of a cursor: more than slots of a token


@aggregate
class Tokens:
    """All tokens' slots; step, end and stop of `Walk`; num_slots, page_stride, PAGE and ROW of the
    cache, as in `gather.Rows`."""

    slots: gl.tensor
    slots_stride: gl.tensor
    lengths: gl.tensor
    K: gl.tensor
    step: gl.tensor
    end: gl.tensor
    stop: gl.tensor
    num_slots: gl.tensor
    page_stride: gl.tensor
    PAGE: gl.constexpr
    ROW: gl.constexpr
    HAS_LENGTHS: gl.constexpr
    SHARES: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self, slots, slots_stride, lengths, K, step, end, stop, num_slots, page_stride,
        PAGE, ROW, HAS_LENGTHS, SHARES,
    ):  # fmt: skip
        self.slots = slots
        self.slots_stride = slots_stride
        self.lengths = lengths
        self.K = K
        self.step = step
        self.end = end
        self.stop = stop
        self.num_slots = num_slots
        self.page_stride = page_stride
        self.PAGE = gl.constexpr(PAGE)
        self.ROW = gl.constexpr(ROW)
        self.HAS_LENGTHS = gl.constexpr(HAS_LENGTHS)
        self.SHARES = gl.constexpr(SHARES)


@aggregate
class Rings:
    """What one warpgroup fills.

    tiles, full     columns [COL, COL + 256) of the items
    rope, offsets   of the second half only: their rope columns, and what scores are added to
    full_v          of it too: `offsets` are there
    counts          [slots, 1] int32, of the first half only: a query's token has so many tiles
    found           [4] int32: a warp's part of `last_end`
    """

    tiles: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    rope: gl.shared_memory_descriptor
    offsets: gl.shared_memory_descriptor
    full_v: gl.shared_memory_descriptor
    counts: gl.shared_memory_descriptor
    found: gl.shared_memory_descriptor
    COL: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, tiles, full, rope, offsets, full_v, counts, found, COL):
        self.tiles = tiles
        self.full = full
        self.rope = rope
        self.offsets = offsets
        self.full_v = full_v
        self.counts = counts
        self.found = found
        self.COL = gl.constexpr(COL)


@aggregate
class Cursor:
    """A place in the stream: the tile of a token's slots from `at` on, its query if at < 0, which
    is QUERY_AT before its first tile's. `stop` is the end of the token's slots, from its first tile
    on that of the last that names a row. Past the last token there are tiles without rows."""

    token: gl.tensor
    at: gl.tensor
    stop: gl.tensor

    @gluon.constexpr_function
    def __init__(self, token, at, stop):
        self.token = token
        self.at = at
        self.stop = stop


@gluon.jit
def enter_token(tokens, token, start):
    """At its query, of which slots from `start` on follow."""
    ok = token < tokens.end
    limit = tokens.K
    if tokens.HAS_LENGTHS:
        limit = gl.minimum(gl.load(tokens.lengths + token, mask=ok, other=0), limit)
    if tokens.SHARES:
        limit = gl.where(token + 1 == tokens.end, gl.minimum(limit, tokens.stop), limit)
    at = gl.where(ok, start + QUERY_AT, 0)
    return Cursor(token, at, gl.where(ok, gl.maximum(limit, 0), 0))


@gluon.jit
def slots_of(tokens, c):
    return tokens.slots + row_of(c.token, tokens.slots_stride)


@gluon.jit
def load_tile_slots(tokens, c, at):
    """The slots of the tile from `at` on of the cursor's token, -1 past the end."""
    at = at + gl.arange(0, BLOCK, gl.SliceLayout(1, GATHER_BF16))
    return gl.load(slots_of(tokens, c) + at, mask=(at >= 0) & (at < c.stop), other=-1)


@gluon.jit
def look_ahead(tokens, c):
    """(slots of the cursor's tile, at a query its token's last slot), -1 without any."""
    last = slots_of(tokens, c) + c.stop - 1
    last = gl.load(last, mask=(c.at < 0) & (c.stop > 0), other=-1)
    return load_tile_slots(tokens, c, c.at), last


@gluon.jit
def last_end(tokens, c, found_by):
    """The end of the slots behind the cursor's query, up to the last that names a row; 0 without
    any. By way of one number a warp in shared memory: `gl.max` over several warps takes a register
    of the loop's."""
    WARPS: gl.constexpr = found_by.shape[0]
    PART: gl.constexpr = SCANNED // WARPS
    warp = gl.arange(0, WARPS, gl.SliceLayout(1, SCAN_BY_WARP))
    lane = gl.arange(0, PART, gl.SliceLayout(0, SCAN_BY_WARP))
    place = (warp * PART)[:, None] + lane[None, :]
    found = gl.full([WARPS, PART], 0, gl.int32, SCAN_BY_WARP)
    for first in range(c.at - QUERY_AT, c.stop, SCANNED):
        at = first + place
        slot = gl.load(slots_of(tokens, c) + at, mask=at < c.stop, other=-1)
        found = gl.where((slot >= 0) & (slot < tokens.num_slots), at + 1, found)
    found_by.store(gl.max(found, 1))
    cta_barrier()
    return gl.minimum(gl.max(found_by.load(IN_EVERY_THREAD), 0), c.stop)  # whatever is read


@gluon.jit
def load_query(q_desc, token, COL: gl.constexpr, full, tile):
    """A token's query from column COL on; rows past the last head are zero."""
    box = reinterpret(tile, gl.bfloat16, [1, tile.shape[0], tile.shape[1]], QUERY_TILE)
    tma_load(q_desc, [token, gl.program_id(1) * BLOCK, COL], full, box)


@gluon.jit
def fill(tokens, c, slot, last, q_desc, q_rope_desc, kv, rings, iv):
    """Start filling slot `iv` of the rings with the cursor's item; slot, last: of `look_ahead`.
    Returns the next item's cursor."""
    stop = c.stop + 0
    full = rings.full.index(iv)
    if c.at < 0:
        WITH_ROPE: gl.constexpr = rings.COL > 0
        COLUMNS: gl.constexpr = HALF + (ROPE if WITH_ROPE else 0)
        mbarrier.expect(full, BLOCK * COLUMNS * 2)  # an arrival too
        load_query(q_desc, c.token, rings.COL, full, rings.tiles.index(iv))
        if WITH_ROPE:
            load_query(q_rope_desc, c.token, 0, full, rings.rope.index(iv))
        if (last < 0) | (last >= tokens.num_slots):
            stop = last_end(tokens, c, rings.found)
        if WITH_ROPE:
            mbarrier.arrive(rings.full_v.index(iv), count=1)
        else:
            size = stop - (c.at - QUERY_AT)
            store_scalar(rings.counts.index(iv), gl.maximum((size + BLOCK - 1) // BLOCK, 1))
            cta_barrier()
        mbarrier.arrive(full, count=ARRIVALS - 1)
    else:
        gather_tile(
            tokens, slot, kv, rings.tiles, rings.rope, rings.offsets, rings.full, rings.full_v, iv,
            rings.COL,
        )  # fmt: skip
    token = c.token + 0
    at = c.at + gl.where(c.at < 0, -QUERY_AT, BLOCK)
    if (c.at >= 0) & (at >= stop):  # of each token one tile at least
        after = enter_token(tokens, token + tokens.step, 0)
        token = after.token
        at = after.at
        stop = after.stop
    return Cursor(token, at, stop)
