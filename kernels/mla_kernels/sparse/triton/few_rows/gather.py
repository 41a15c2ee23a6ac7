# SPDX-License-Identifier: Apache-2.0
"""Filling the ring with the rows that slots name, by asynchronous copies: Gluon device functions.

Rows are counted in units of 16 bits, as in decode/triton/few_rows/copies.py. A slot that names no
row copies nothing: its row of the tile is zeroed.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from mla_kernels import numerics
from mla_kernels.decode.triton.few_rows.copies import indices
from mla_kernels.triton_common.gluon_compat import aggregate, copy_to_shared

GRID_OFFSET = gl.constexpr(numerics.GRID_OFFSET)


@aggregate
class Rows:
    """The cache, and a program's range of slots, `slots[start:stop]`.

    page_step is a page's stride in 16 bytes, ROW a row's in units.
    """

    kv: gl.tensor
    scales: gl.tensor
    slots: gl.tensor
    start: gl.tensor
    stop: gl.tensor
    num_slots: gl.tensor
    page_step: gl.tensor
    PAGE: gl.constexpr
    ROW: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, kv, scales, slots, start, stop, num_slots, page_step, PAGE, ROW):
        self.kv = kv
        self.scales = scales
        self.slots = slots
        self.start = start
        self.stop = stop
        self.num_slots = num_slots
        self.page_step = page_step
        self.PAGE = gl.constexpr(PAGE)
        self.ROW = gl.constexpr(ROW)


@gluon.constexpr_function
def latent_copy(WARPS):
    """16 bytes a thread; 8 lanes have the same row's group of 128 columns."""
    return gl.BlockedLayout([1, 1, 8], [1, 4, 8], [1, WARPS, 1], [2, 1, 0])


@gluon.constexpr_function
def row_copy(VECTOR, WARPS):
    """As latent_copy for two-dimensional parts: the same rows in each thread."""
    return gl.BlockedLayout([1, VECTOR], [4, 8], [WARPS, 1], [1, 0])


@gluon.jit
def last_slot(rows, WARPS: gl.constexpr):
    """One past the last slot of the range that names a row; its start if there is none."""
    SCAN: gl.constexpr = gl.BlockedLayout([4], [32], [WARPS], [0])
    SCANNED: gl.constexpr = 128 * WARPS
    start, stop = rows.start, rows.stop
    last = gl.load(rows.slots + stop - 1, mask=stop > start, other=-1)
    if (last < 0) | (last >= rows.num_slots):
        found = gl.full([SCANNED], 0, gl.int32, SCAN) + start
        for first in range(start, stop, SCANNED):
            at = first + gl.arange(0, SCANNED, SCAN)
            slot = gl.load(rows.slots + at, mask=at < stop, other=-1)
            found = gl.where((slot >= 0) & (slot < rows.num_slots), at + 1, found)
        stop = gl.max(found, 0)
    return stop


@gluon.jit
def load_slots(rows, tile, BN: gl.constexpr, LAYOUT: gl.constexpr):
    """[BN] slots of a tile, -1 past the end."""
    at = rows.start + tile * BN + gl.arange(0, BN, LAYOUT)
    return gl.load(rows.slots + at, mask=at < rows.stop, other=-1)


@gluon.jit
def gather_part(
    ptr, row, ok, target,
    OFFSET: gl.constexpr, VECTOR: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """[rows, N] from column OFFSET on of each row; VECTOR elements are 16 bytes."""
    COPY: gl.constexpr = row_copy(VECTOR, WARPS)
    row = gl.convert_layout(row, gl.SliceLayout(1, COPY), assert_trivial=True)
    ok = gl.convert_layout(ok, gl.SliceLayout(1, COPY), assert_trivial=True)
    column = gl.arange(0, target.shape[1], gl.SliceLayout(0, COPY))[None, :]
    at = ptr + (gl.multiple_of(row, VECTOR)[:, None] + (OFFSET + column))
    copy_to_shared(target, at, mask=ok[:, None])


@gluon.jit
def gather_tile(
    rows, slot, latent, rope, scales, grid,
    SCALE_OFFSET: gl.constexpr, ROPE_OFFSET: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Ask for the rows that `slot` names; slot [BN] in the rows of latent_copy. grid [BN] becomes
    what their scores are added to: -inf where there is no row."""
    ok = (slot >= 0) & (slot < rows.num_slots)
    grid.store(gl.where(ok, GRID_OFFSET, -float("inf")))
    slot = gl.where(ok, slot, 0).to(gl.uint32)
    row = (slot // rows.PAGE).to(gl.int64) * (rows.page_step * 8)
    row += (slot % rows.PAGE).to(gl.int32) * rows.ROW
    group, _, unit = indices(latent_copy(WARPS), latent.shape[0], latent.shape[1], 64)
    at = gl.expand_dims(gl.expand_dims(gl.multiple_of(row, 8), 0), 2) + (group * 64 + unit)
    mask = gl.expand_dims(gl.expand_dims(ok, 0), 2)
    copy_to_shared(latent, rows.kv + at, mask=mask)
    gather_part(rows.kv, row, ok, rope, ROPE_OFFSET, 8, WARPS)
    gather_part(rows.scales, row // 2, ok, scales, SCALE_OFFSET, 4, WARPS)
