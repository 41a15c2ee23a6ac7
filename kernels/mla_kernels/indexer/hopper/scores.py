# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: RUF005 (Triton adds tuples, and knows no stars)
# mypy: disable-error-code="assignment"
"""Indexer scores on Hopper: pages by TMA into a ring, from there into wgmma.

A CTA is one warpgroup and works on tiles of ROWS consecutive rows: a page is loaded once for those
of them that read it. By default e4m3 becomes fp16, exactly, on the way into registers. A dot
product does not mind in which order d runs, so q is laid out in the order in which the threads read
a key: two 16-byte loads without bank conflicts under the TMA's swizzle (layouts.py).

With FP8 the codes themselves are multiplied, G rows in one product. Hopper's tensor cores add those
with some 14 bits.

    share.py      which pages of which tiles a program takes
    this file     the tiles of a program: rows, limits, requests, queries
    pages.py      the pages of a tile: products, sums, stores
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.language.extra.cuda import gdc_launch_dependents

from mla_kernels.indexer.hopper.layouts import (
    KEYS,
    LIST,
    PAGE,
    QUERY,
    QUERY_LOAD,
    SCALES,
    VECTOR,
    D,
    operand,
)
from mla_kernels.indexer.hopper.pages import load_first_pages, score_pages
from mla_kernels.indexer.hopper.share import START, cost, program_share, rows_of, tile_pages
from mla_kernels.triton_common.gluon_compat import cta_barrier


@gluon.jit
def row_limits(lengths_ptr, requests_ptr, first_row, stop_row, n, max_len, ROWS: gl.constexpr):
    """(limits, request): how many keys each row of a tile sees of the request of row n, which is -1
    for padding and where a row before n has it. Without requests_ptr of the only request there is.
    """
    limits = ()
    request = gl.to_tensor(0)
    if requests_ptr is not None:
        request = gl.load(requests_ptr + first_row + n, mask=first_row + n < stop_row, other=-1)
    found = request
    for i in gl.static_range(ROWS):
        own = first_row + i < stop_row
        if requests_ptr is not None:
            of_row = gl.load(requests_ptr + first_row + i, mask=own, other=-1)
            own = own & (of_row == found)
            request = gl.where(own & (i < n), -1, request)
        length = gl.load(lengths_ptr + first_row + i, mask=own, other=0)
        limits = limits + (gl.minimum(length, max_len),)
    return limits, request


@gluon.jit
def load_queries(
    q_ptr, weights_ptr, first_row, stop_row, q_shared, weights,
    stride_q_row, stride_q_head, stride_weights,
    H: gl.constexpr, HEADS: gl.constexpr, ROWS: gl.constexpr, G: gl.constexpr, FP8: gl.constexpr,
):  # fmt: skip
    """All rows on their way before the first is stored."""
    h = gl.arange(0, HEADS, gl.SliceLayout(1, QUERY_LOAD))
    h_at = (h.to(gl.int64) * stride_q_head)[:, None]  # heads may be further apart than 32 bits
    d = gl.arange(0, D, gl.SliceLayout(0, QUERY_LOAD))
    head = gl.arange(0, HEADS, LIST)
    row = first_row.to(gl.int64)
    codes, heads = (), ()
    for i in gl.static_range(ROWS):
        here = first_row + i < stop_row
        at = q_ptr + (row + i) * stride_q_row + h_at + d[None, :]
        codes = codes + (gl.load(at, mask=(h < H)[:, None] & here, other=0),)
        at = weights_ptr + (row + i) * stride_weights + head
        heads = heads + (gl.load(at, mask=(head < H) & here, other=0.0),)
    for i in gl.static_range(ROWS):
        q_shared.index(i // G).slice(i % G * HEADS, HEADS).store(operand(codes[i], FP8))
        weights.index(i // G).slice(i % G * HEADS, HEADS).store(heads[i])
    fence_async_shared()
    cta_barrier()


@gluon.jit(
    do_not_specialize=[
        "num_tiles",
        "num_rows",
        "rows_per_request",
        "stride_weights",
        "stride_table",
    ]
)
def hopper_scores_kernel(
    keys_desc,  # [num_blocks * 66, 128] uint8, boxes [64, 128]
    scales_desc,  # the same, boxes [2, 128]
    q_ptr,  # [T, H, 128] uint8 (e4m3)
    weights_ptr,  # [T, H] fp32
    table_ptr,  # [B, max_blocks] int32
    requests_ptr,  # [T] int32: the request of each row, -1 for padding; or None
    lengths_ptr,  # [T] int32
    scores_ptr,  # [T, 64 * max_blocks] fp32, written up to the end of each row's last page
    num_tiles,
    num_rows,
    rows_per_request,
    max_len,
    stride_q_row,
    stride_q_head,
    stride_weights,
    stride_table,
    stride_scores,
    H: gl.constexpr,
    HEADS: gl.constexpr,
    ROWS: gl.constexpr,
    TILES: gl.constexpr,
    IN_TURNS: gl.constexpr,
    STAGES: gl.constexpr,
    FP8: gl.constexpr,
):
    gdc_launch_dependents()
    RAGGED: gl.constexpr = requests_ptr is not None
    G: gl.constexpr = ROWS if FP8 else 1
    DOTS: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, G * HEADS, 32 if FP8 else 16]
    )
    keys = gl.allocate_shared_memory(gl.uint8, [STAGES, PAGE, D], KEYS)
    if FP8:
        q_shared = gl.allocate_shared_memory(gl.float8e4nv, [ROWS // G, G * HEADS, D], KEYS)
    else:
        q_shared = gl.allocate_shared_memory(gl.float16, [ROWS // G, G * HEADS, D], QUERY)
    scales = gl.allocate_shared_memory(gl.uint8, [STAGES, 2, D], SCALES)
    weights = gl.allocate_shared_memory(gl.float32, [ROWS // G, G * HEADS], VECTOR)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
    fence_async_shared()

    tile, skipped, left = program_share(
        lengths_ptr, num_tiles, num_rows, rows_per_request, max_len, ROWS, RAGGED, TILES, IN_TURNS
    )
    slot = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    while left > 0:
        first_row, stop_row, request = rows_of(tile, num_rows, rows_per_request, ROWS, RAGGED)
        pages = tile_pages(lengths_ptr, first_row, stop_row, max_len, ROWS)
        first = gl.maximum(skipped - START, 0)
        stop = gl.minimum(left - START, pages)
        left -= cost(pages)
        skipped = gl.to_tensor(0)
        tile += 1
        for n in range(ROWS if RAGGED else 1):  # the requests of the tile's rows, each once
            limits, of_row = row_limits(
                lengths_ptr, requests_ptr, first_row, stop_row, n, max_len, ROWS
            )
            last = stop
            if RAGGED:
                request = gl.maximum(of_row, 0)
                longest = gl.to_tensor(0)
                for i in gl.static_range(ROWS):
                    longest = gl.maximum(longest, limits[i])
                last = gl.minimum(stop, (longest + PAGE - 1) // PAGE)
                last = gl.where(of_row < 0, first, last)
            table = table_ptr + request.to(gl.int64) * stride_table
            load_first_pages(
                keys_desc, scales_desc, table, first, last, keys, scales, full, slot, STAGES
            )
            if (n == 0) & (first < stop):
                load_queries(
                    q_ptr, weights_ptr, first_row, stop_row, q_shared, weights,
                    stride_q_row, stride_q_head, stride_weights, H, HEADS, ROWS, G, FP8,
                )  # fmt: skip
            if first < last:
                slot, phase = score_pages(
                    keys_desc, scales_desc, table, first, last, keys, scales, full, slot, phase,
                    q_shared, weights, limits, first_row.to(gl.int64), scores_ptr,
                    stride_scores, DOTS, HEADS, ROWS, G, STAGES, FP8,
                )  # fmt: skip
        cta_barrier()  # all have done with q
