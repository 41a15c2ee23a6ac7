# SPDX-License-Identifier: Apache-2.0
"""Which slots a program attends to, and asynchronous copies of the rows they name.

A slot that names no row copies nothing: its row of the tile is zeroed, its score masked.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from mla_kernels import numerics
from mla_kernels.decode.hopper.layouts import BLOCK
from mla_kernels.sparse.hopper.layouts import SCAN
from mla_kernels.triton_common.gluon_compat import aggregate, copy_to_shared

GRID_OFFSET = gl.constexpr(numerics.GRID_OFFSET)
SCANNED = gl.constexpr(512)


@aggregate
class Rows:
    """The cache and a program's range of slots, `slots[start:stop]`. Strides are in elements of the
    cache's pointer."""

    slots: gl.tensor
    start: gl.tensor
    stop: gl.tensor
    num_slots: gl.tensor
    page_stride: gl.tensor
    PAGE: gl.constexpr
    ROW: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, slots, start, stop, num_slots, page_stride, PAGE, ROW):
        self.slots = slots
        self.start = start
        self.stop = stop
        self.num_slots = num_slots
        self.page_stride = page_stride
        self.PAGE = gl.constexpr(PAGE)
        self.ROW = gl.constexpr(ROW)


@gluon.jit
def program_token(num_heads):
    """(token, first head) of this program."""
    row_tiles = (num_heads + BLOCK - 1) // BLOCK
    token = (gl.program_id(0) // row_tiles).to(gl.int64)
    return token, (gl.program_id(0) % row_tiles) * BLOCK


@gluon.jit
def program_rows(
    slots, slots_stride, lengths, K, span, token, num_slots, page_stride,
    PAGE: gl.constexpr, ROW: gl.constexpr, HAS_LENGTHS: gl.constexpr,
):  # fmt: skip
    """This program's Rows."""
    limit = K
    if HAS_LENGTHS:
        limit = gl.minimum(gl.load(lengths + token), K)
    slots = slots + token * slots_stride
    start = gl.program_id(1) * span
    stop = gl.maximum(gl.minimum(start + span, limit), start)
    return Rows(slots, start, stop, num_slots, page_stride, PAGE, ROW)


@gluon.jit
def count_tiles(rows):
    """Tiles up to the last slot that names a row, at least one."""
    start, stop = rows.start, rows.stop
    last = gl.load(rows.slots + stop - 1, mask=stop > start, other=-1)
    if (last < 0) | (last >= rows.num_slots):
        lane = gl.arange(0, SCANNED, SCAN)
        found = gl.full([SCANNED], 0, gl.int32, SCAN) + start
        for first in range(start, stop, SCANNED):
            at = first + lane
            slot = gl.load(rows.slots + at, mask=at < stop, other=-1)
            found = gl.where((slot >= 0) & (slot < rows.num_slots), at + 1, found)
        stop = gl.minimum(gl.max(found, 0), rows.stop)  # no tile too many, whatever is read
    return gl.maximum((stop - start + BLOCK - 1) // BLOCK, 1)


@gluon.jit
def load_slots(rows, tile, LAYOUT: gl.constexpr):
    """The slots of a tile, -1 past the end, with a thread's rows as LAYOUT has them."""
    at = rows.start + tile * BLOCK + gl.arange(0, BLOCK, gl.SliceLayout(1, LAYOUT))
    return gl.load(rows.slots + at, mask=at < rows.stop, other=-1)


@gluon.jit
def slot_rows(rows, slot):
    """(offset of each slot's row, int64; whether it names one)."""
    ok = (slot >= 0) & (slot < rows.num_slots)
    slot = gl.where(ok, slot, 0).to(gl.uint32)
    page = (slot // rows.PAGE).to(gl.int64)
    return page * rows.page_stride + (slot % rows.PAGE).to(gl.int32) * rows.ROW, ok


@gluon.jit
def gather(tile, base, row, ok, COL: gl.constexpr, LAYOUT: gl.constexpr):
    """Copy columns [COL, COL + width of tile) of each row into a shared tile."""
    WIDTH: gl.constexpr = tile.shape[1]
    ALIGNED: gl.constexpr = 128 // base.dtype.element_ty.primitive_bitwidth  # to 16 bytes
    row = gl.convert_layout(row, gl.SliceLayout(1, LAYOUT))
    mask = gl.convert_layout(ok, gl.SliceLayout(1, LAYOUT))[:, None]
    column = gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))
    at = gl.multiple_of(row, ALIGNED)[:, None] + column[None, :]
    copy_to_shared(tile, base + COL + at, mask=mask)


@gluon.jit
def store_offsets(offsets, ok):
    """What each score of a tile is added to: the grid, or -inf where there is no row."""
    offsets.store(gl.where(ok, GRID_OFFSET, -float("inf")))
