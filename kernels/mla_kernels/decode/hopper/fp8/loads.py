# SPDX-License-Identifier: Apache-2.0
"""The stream of TMA loads: half a tile of codes each for two warpgroups, across segments."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from mla_kernels.decode.hopper.layouts import BLOCK, SCALE_COL
from mla_kernels.decode.hopper.segments import next_segment
from mla_kernels.triton_common.gluon_compat import aggregate, tma_load


@aggregate
class Place:
    """The tile that is loaded next: `tile` of `request`, in the segment [.., hi)."""

    request: gl.tensor
    tile: gl.tensor
    hi: gl.tensor
    end: gl.tensor

    @gluon.constexpr_function
    def __init__(self, request, tile, hi, end):
        self.request = request
        self.tile = tile
        self.hi = hi
        self.end = end


@gluon.jit
def page_of(plan, c):
    """Its cache page."""
    row = plan.table + gl.minimum(c.request, plan.last).to(gl.int64) * plan.table_stride
    return gl.load(row + gl.maximum(c.tile, 0))


@gluon.jit
def load_half(
    c, page, plan, desc, rope_desc, scale_desc, ring, rope_ring, scale_ring, full, slot,
    COL: gl.constexpr, ROPE_COL: gl.constexpr, GROUPED: gl.constexpr,
):  # fmt: skip
    """Fill `slot` with the tile's columns from COL on (the second half: and what follows), and
    step on."""
    ok = c.request <= plan.last
    row = page * BLOCK
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
    end = c.end
    if number >= hi:
        request, lo, hi, end = next_segment(plan, request, hi, end)
        number = lo + 0
    return Place(request, number, hi, end)
