# SPDX-License-Identifier: Apache-2.0
"""The stream of TMA loads, across segments.

A segment is loaded as hi - lo + 1 tiles: its query tile first, through the same rings as the cache
tiles, so that the rings stay full across the border between two requests.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from mla_kernels.decode.hopper.layouts import BLOCK, HALF, PASS_128, QUERY, QUERY_TILE, ROPE
from mla_kernels.decode.hopper.segments import next_segment
from mla_kernels.triton_common.gluon_compat import aggregate, reinterpret, tma_load

LATENT = gl.constexpr(2 * HALF.value)


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
