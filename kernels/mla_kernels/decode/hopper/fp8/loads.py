# SPDX-License-Identifier: Apache-2.0
"""The stream of TMA loads: half a tile of codes each for two warpgroups, across segments.

A step is STEP tiles; a segment of [lo, hi) tiles is loaded as a whole number of steps, the missing
tiles being copies of its last one.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from mla_kernels.decode.hopper.convert import SCALE_COL
from mla_kernels.decode.hopper.gluon_compat import aggregate, tma_load
from mla_kernels.decode.hopper.layouts import BLOCK
from mla_kernels.decode.hopper.stream import next_segment


@aggregate
class Place:
    """The tile that is loaded next: `tile` of `request`, in the segment [.., hi), loaded up to
    `stop`. `page` is its cache page."""

    request: gl.tensor
    tile: gl.tensor
    hi: gl.tensor
    stop: gl.tensor
    end: gl.tensor
    page: gl.tensor

    @gluon.constexpr_function
    def __init__(self, request, tile, hi, stop, end, page):
        self.request = request
        self.tile = tile
        self.hi = hi
        self.stop = stop
        self.end = end
        self.page = page


@gluon.jit
def place(plan, request, tile, hi, stop, end):
    row = plan.table + gl.minimum(request, plan.last).to(gl.int64) * plan.table_stride
    page = gl.load(row + gl.maximum(gl.minimum(tile, hi - 1), 0))
    return Place(request, tile, hi, stop, end, page)


@gluon.jit
def padded(lo, hi, STEP: gl.constexpr):
    return lo + (hi - lo + STEP - 1) // STEP * STEP


@gluon.jit
def first_place(plan, request, lo, hi, end, STEP: gl.constexpr):
    return place(plan, request + 0, lo + 0, hi + 0, padded(lo, hi, STEP), end + 0)


@gluon.jit
def load_half(
    c, plan, desc, rope_desc, scale_desc, ring, rope_ring, scale_ring, full, slot,
    COL: gl.constexpr, ROPE_COL: gl.constexpr, STEP: gl.constexpr, GROUPED: gl.constexpr,
):  # fmt: skip
    """Fill `slot` with the tile's columns from COL on (the second half: and what follows), and
    step on."""
    ok = c.request <= plan.last
    row = c.page * BLOCK
    bar = full.index(slot)
    tile = ring.index(slot)
    size: gl.constexpr = BLOCK * ring.shape[2] * 2
    if COL > 0:
        rope = rope_ring.index(slot)
        rope_size: gl.constexpr = BLOCK * rope_ring.shape[2] * 2
        mbarrier.expect(bar, size + rope_size + BLOCK * 16 * GROUPED, pred=ok)
        tma_load(desc, [row, COL], bar, tile, pred=ok)
        tma_load(rope_desc, [row, ROPE_COL], bar, rope, pred=ok)
        if GROUPED:
            tma_load(scale_desc, [row, SCALE_COL], bar, scale_ring.index(slot), pred=ok)
    else:
        mbarrier.expect(bar, size, pred=ok)
        tma_load(desc, [row, COL], bar, tile, pred=ok)
    request = c.request
    number = c.tile + 1
    hi = c.hi
    stop = c.stop
    end = c.end
    if number >= stop:
        request, lo, hi, end = next_segment(plan, request, hi, end)
        number = lo + 0
        stop = padded(lo, hi, STEP)
    return place(plan, request, number, hi, stop, end)
