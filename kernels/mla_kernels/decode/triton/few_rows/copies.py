# SPDX-License-Identifier: Apache-2.0
"""Filling the ring of cache tiles with asynchronous copies, as Gluon device functions.

A cache row is counted in units of 16 bits: a bf16 or fp16 element, or two neighbouring e4m3 codes.
A tile is (latent [groups, BN, units of 128 columns], rope [BN, units], scales [BN, 4] fp32).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from mla_kernels.triton_common.gluon_compat import copy_to_shared


@gluon.jit
def indices(L: gl.constexpr, X: gl.constexpr, Y: gl.constexpr, Z: gl.constexpr):
    """The three indices of an [X, Y, Z] tensor of layout L, ready to broadcast."""
    x = gl.arange(0, X, gl.SliceLayout(1, gl.SliceLayout(2, L)))
    y = gl.arange(0, Y, gl.SliceLayout(0, gl.SliceLayout(2, L)))
    z = gl.arange(0, Z, gl.SliceLayout(0, gl.SliceLayout(1, L)))
    return (
        gl.expand_dims(gl.expand_dims(x, 1), 2),
        gl.expand_dims(gl.expand_dims(y, 0), 2),
        gl.expand_dims(gl.expand_dims(z, 0), 1),
    )


@gluon.jit
def copy_latent(kv_ptr, base, left, target, ROW: gl.constexpr, WARPS: gl.constexpr):
    """[groups, rows, units] of one page, zeros at and past `left` rows."""
    UNITS: gl.constexpr = target.shape[2]
    ACROSS: gl.constexpr = UNITS // 8
    COPY: gl.constexpr = gl.BlockedLayout(
        [1, 1, 8], [1, 32 // ACROSS, ACROSS], [1, WARPS, 1], [2, 1, 0]
    )
    group, row, unit = indices(COPY, target.shape[0], target.shape[1], UNITS)
    at = kv_ptr + base + (group * UNITS + row * ROW + unit)
    copy_to_shared(target, at, mask=row < left)


@gluon.jit
def copy_rows(
    ptr, base, left, target,
    OFFSET: gl.constexpr, ROW: gl.constexpr, VECTOR: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """[rows, N] of one page from column OFFSET on, likewise; VECTOR elements are 16 bytes."""
    N: gl.constexpr = target.shape[1]
    ACROSS: gl.constexpr = N // VECTOR
    COPY: gl.constexpr = gl.BlockedLayout([1, VECTOR], [32 // ACROSS, ACROSS], [WARPS, 1], [1, 0])
    row = gl.arange(0, target.shape[0], gl.SliceLayout(1, COPY))[:, None]
    column = gl.arange(0, N, gl.SliceLayout(0, COPY))[None, :]
    at = ptr + base + (row * ROW + (OFFSET + column))
    copy_to_shared(target, at, mask=row < left)


@gluon.jit
def load_pages(table, tile, length, BN: gl.constexpr, PAGE: gl.constexpr):
    """The cache pages of a tile. Past the request's end they are its last one."""
    last = (length - 1) // PAGE
    first = tile * BN // PAGE
    pages = ()
    for p in gl.static_range((BN + PAGE - 1) // PAGE):
        page = gl.load(table + gl.minimum(first + p, last))
        pages = pages + (page,)  # type: ignore[assignment]  # noqa: RUF005
    return pages


@gluon.jit
def copy_tile(
    kv_ptr, scale_ptr, page_step, pages, tile, length, latent, rope, scales,
    PAGE: gl.constexpr, ROW: gl.constexpr, SCALED: gl.constexpr,
    SCALE_OFFSET: gl.constexpr, ROPE_OFFSET: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Ask for a tile. Rows past the request's end become zeros; their bytes are not read."""
    BN: gl.constexpr = latent.shape[1]
    N: gl.constexpr = min(BN, PAGE)
    for p in gl.static_range((BN + PAGE - 1) // PAGE):
        left = length - tile * BN - p * N
        base = pages[p].to(gl.int64) * (page_step * 8)
        if PAGE > BN:
            base += tile * BN % PAGE * ROW
        copy_latent(kv_ptr, base, left, latent.slice(p * N, N, dim=1), ROW, WARPS)
        part = rope.slice(p * N, N, dim=0)
        copy_rows(kv_ptr, base, left, part, ROPE_OFFSET, ROW, 8, WARPS)
        if SCALED:
            part = scales.slice(p * N, N, dim=0)
            copy_rows(scale_ptr, base // 2, left, part, SCALE_OFFSET, ROW // 2, 4, WARPS)
