# SPDX-License-Identifier: Apache-2.0
"""Indexer scores: relu(q . k) weighted over the heads, in the epilogue of the matmul.

A tile is up to ROWS consecutive rows, so that a page of keys is read once for all of them. The keys
stand on the M side of the matmul (64 tokens, one page), the heads of the tile's rows on its N side.
With SPLIT the pages of all tiles, counted on the device, are dealt out evenly to a fixed number of
programs; without it a program takes one tile.
"""

import triton
import triton.language as tl

from mla_kernels.triton_common.fp8 import e4m3_to_float

PAGE = tl.constexpr(64)


@triton.jit
def tile_rows(tile, num_rows, rows_per_request, ROWS: tl.constexpr, RAGGED: tl.constexpr):
    """(first row, one past the last row, request) of a tile; RAGGED rows carry their request."""
    if RAGGED:
        request = tile * 0
        first = tile * ROWS
        stop = tl.minimum(first + ROWS, num_rows)
    else:
        tiles_per_request = tl.cdiv(rows_per_request, ROWS)
        request = tile // tiles_per_request
        start = request * rows_per_request
        first = start + (tile - request * tiles_per_request) * ROWS
        stop = tl.minimum(first + ROWS, start + rows_per_request)
    return first, stop, request


@triton.jit
def load_lengths(lengths_ptr, row, inside, max_len):
    """Keys that each row sees, never more than its block table holds."""
    lengths = tl.load(lengths_ptr + row, mask=inside, other=0)
    return tl.minimum(tl.maximum(lengths, 0), max_len)


@triton.jit
def tile_pages(
    lengths_ptr,
    tiles,
    num_tiles,
    num_rows,
    rows_per_request,
    max_len,
    ROWS: tl.constexpr,
    RAGGED: tl.constexpr,
):
    """[N] tile numbers -> pages that each reads, 0 past num_tiles."""
    first, stop, _ = tile_rows(tiles, num_rows, rows_per_request, ROWS, RAGGED)
    row = first[:, None] + tl.arange(0, ROWS)[None, :]
    inside = (row < stop[:, None]) & (tiles < num_tiles)[:, None]
    longest = tl.max(load_lengths(lengths_ptr, row, inside, max_len), axis=1)
    return tl.cdiv(longest, PAGE)


@triton.jit
def score_pages(
    q,  # [D, ROWS * HEADS]
    weights,  # [ROWS * HEADS] fp32
    lengths,  # [ROWS] int32
    row,  # [ROWS] int64
    own,  # [ROWS] bool: rows to store
    table_ptr,  # block table row of the request
    page_begin,
    page_end,
    k_ptr,
    scores_ptr,
    stride_page,
    stride_scores,
    H: tl.constexpr,
    D: tl.constexpr,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    K_FP8: tl.constexpr,
    DOT: tl.constexpr,
    FP8_HARDWARE: tl.constexpr,
    UPCAST: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Scores of the tokens of pages [page_begin, page_end) for the rows of one request."""
    token = tl.arange(0, PAGE)
    d = tl.arange(0, D)
    for page in tl.range(page_begin, page_end, num_stages=STAGES):
        page_ptr = k_ptr + tl.load(table_ptr + page).to(tl.int64) * stride_page
        k = tl.load(page_ptr + token[:, None] * D + d[None, :])
        if K_FP8:
            scale_ptr = (page_ptr + PAGE * D).to(tl.pointer_type(tl.float32))
            k_scale = tl.load(scale_ptr + token)
            k = e4m3_to_float(k, DOT, FP8_HARDWARE)
        if UPCAST:
            k = k.to(tl.float32)
        dots = tl.dot(k, q, input_precision="ieee")
        # NaN passes through the ReLU as it does in torch.
        relu = tl.maximum(dots, 0.0, propagate_nan=tl.PropagateNan.ALL)
        if HEADS > H and not K_FP8:
            # An infinite key times the zeroes of a head that there is not is NaN; e4m3 has none.
            head = tl.arange(0, ROWS * HEADS) % HEADS
            relu = tl.where((head < H)[None, :], relu, 0.0)
        weighted = tl.reshape(relu * weights[None, :], (PAGE, ROWS, HEADS))
        score = tl.sum(weighted, axis=2)
        if K_FP8:
            score *= k_scale[:, None]
        key_index = page * PAGE + token
        score = tl.where(key_index[:, None] < lengths[None, :], score, float("-inf"))
        score_ptr = scores_ptr + row[None, :] * stride_scores + key_index[:, None]
        tl.store(score_ptr, score, mask=own[None, :])


@triton.jit
def score_tile(
    tile,
    page_begin,
    page_end,
    q_ptr,
    k_ptr,
    weights_ptr,
    table_ptr,
    requests_ptr,
    lengths_ptr,
    scores_ptr,
    num_rows,
    rows_per_request,
    max_len,
    stride_q_row,
    stride_q_head,
    stride_page,
    stride_weights,
    stride_table,
    stride_scores,
    H: tl.constexpr,
    D: tl.constexpr,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    RAGGED: tl.constexpr,
    Q_FP8: tl.constexpr,
    K_FP8: tl.constexpr,
    DOT: tl.constexpr,
    FP8_HARDWARE: tl.constexpr,
    UPCAST: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Pages [page_begin, page_end) of a tile, request by request."""
    first, stop, request = tile_rows(tile, num_rows, rows_per_request, ROWS, RAGGED)
    i = tl.arange(0, ROWS)
    row = (first + i).to(tl.int64)
    inside = first + i < stop
    lengths = load_lengths(lengths_ptr, row, inside, max_len)

    column = tl.arange(0, ROWS * HEADS)
    q_row = (first + column // HEADS).to(tl.int64)
    head = (column % HEADS).to(tl.int64)  # may be further apart than 32 bits reach
    column_inside = (q_row < stop) & (head < H)
    d = tl.arange(0, D)
    q_ptrs = q_ptr + (q_row * stride_q_row + head * stride_q_head)[None, :] + d[:, None]
    q = tl.load(q_ptrs, mask=column_inside[None, :], other=0)
    if Q_FP8:
        q = e4m3_to_float(q, DOT, FP8_HARDWARE)
    if UPCAST:
        q = q.to(tl.float32)
    weights = tl.load(weights_ptr + q_row * stride_weights + head, mask=column_inside, other=0.0)

    if RAGGED:
        requests = tl.load(requests_ptr + row, mask=inside, other=-1)
        for n in range(ROWS):
            request = tl.sum(tl.where(i == n, requests, 0))
            own = inside & (requests == request)
            done = tl.sum((own & (i < n)).to(tl.int32)) > 0
            if (request >= 0) & (done == 0):
                longest = tl.max(tl.where(own, lengths, 0))
                score_pages(
                    q, weights, lengths, row, own,
                    table_ptr + request.to(tl.int64) * stride_table,
                    page_begin, tl.minimum(page_end, tl.cdiv(longest, PAGE)),
                    k_ptr, scores_ptr, stride_page, stride_scores,
                    H, D, HEADS, ROWS, K_FP8, DOT, FP8_HARDWARE, UPCAST, STAGES,
                )  # fmt: skip
    else:
        score_pages(
            q, weights, lengths, row, inside,
            table_ptr + request.to(tl.int64) * stride_table,
            page_begin, page_end,
            k_ptr, scores_ptr, stride_page, stride_scores,
            H, D, HEADS, ROWS, K_FP8, DOT, FP8_HARDWARE, UPCAST, STAGES,
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_tiles", "num_rows", "rows_per_request"])
def scores_kernel(
    q_ptr,  # [T, H, D] uint8 (e4m3) or bf16
    k_ptr,  # [num_blocks, 64, D + 4] uint8 pages or [num_blocks, 64, D] bf16
    weights_ptr,  # [T, H] fp32
    table_ptr,  # [B, max_blocks] int32
    requests_ptr,  # [T] int32, where RAGGED
    lengths_ptr,  # [T] int32: keys that the row sees, at most 64 * max_blocks
    scores_ptr,  # [T, 64 * max_blocks] fp32, written up to the end of each row's last page
    num_tiles,
    num_rows,
    rows_per_request,
    max_len,
    stride_q_row,
    stride_q_head,
    stride_page,
    stride_weights,
    stride_table,
    stride_scores,
    H: tl.constexpr,
    D: tl.constexpr,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    TILES: tl.constexpr,
    SPLIT: tl.constexpr,
    RAGGED: tl.constexpr,
    Q_FP8: tl.constexpr,
    K_FP8: tl.constexpr,
    DOT: tl.constexpr,
    FP8_HARDWARE: tl.constexpr,
    UPCAST: tl.constexpr,
    STAGES: tl.constexpr,
):
    program = tl.program_id(0)
    tiles = tl.arange(0, TILES) if SPLIT else program + tl.arange(0, 1)
    pages = tile_pages(
        lengths_ptr, tiles, num_tiles, num_rows, rows_per_request, max_len, ROWS, RAGGED
    )
    if SPLIT:
        ends = tl.cumsum(pages, axis=0)
        total = tl.max(ends)
        share = tl.cdiv(total, tl.num_programs(0))
        begin = program * share
        end = tl.minimum(begin + share, total)
    else:
        begin = 0
        end = tl.max(pages)
    while begin < end:
        if SPLIT:
            tile = tl.sum((ends <= begin).to(tl.int32))
            tile_begin = tl.max(tl.where(tiles < tile, ends, 0))
            tile_end = tl.sum(tl.where(tiles == tile, ends, 0))
        else:
            tile = program
            tile_begin = 0
            tile_end = end
        stop = tl.minimum(end, tile_end)
        score_tile(
            tile, begin - tile_begin, stop - tile_begin,
            q_ptr, k_ptr, weights_ptr, table_ptr, requests_ptr, lengths_ptr, scores_ptr,
            num_rows, rows_per_request, max_len,
            stride_q_row, stride_q_head, stride_page, stride_weights, stride_table, stride_scores,
            H, D, HEADS, ROWS, RAGGED, Q_FP8, K_FP8, DOT, FP8_HARDWARE, UPCAST, STAGES,
        )  # fmt: skip
        begin = stop
