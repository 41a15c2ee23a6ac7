# SPDX-License-Identifier: Apache-2.0
"""The pages of all tiles, counted on the device, dealt out evenly to the programs."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from mla_kernels.indexer.hopper.layouts import LIST, PAGE
from mla_kernels.indexer.triton.scores import tile_rows

# What starting a tile costs, in pages. Without it all wait for the program with the shortest rows
# of a prompt, some 90 tiles of a page or two.
START = gl.constexpr(4)


@gluon.jit
def add(a, b):
    return a + b


@gluon.jit
def rows_of(tile, num_rows, rows_per_request, ROWS: gl.constexpr, RAGGED: gl.constexpr):
    """See `tile_rows`, which divides; of one row a tile, which are the requests or name them."""
    if ROWS == 1:
        return tile, tile + 1, tile
    else:
        return tile_rows(tile, num_rows, rows_per_request, ROWS, RAGGED)


@gluon.jit
def tile_pages(lengths_ptr, first, stop, max_len, ROWS: gl.constexpr):
    """Pages up to the last key that one of the rows [first, stop) sees."""
    longest = first * 0
    for i in gl.static_range(ROWS):
        length = gl.load(lengths_ptr + first + i, mask=first + i < stop, other=0)
        longest = gl.maximum(longest, length)
    return (gl.minimum(longest, max_len) + PAGE - 1) // PAGE


@gluon.jit
def cost(pages):
    """Of a tile, in pages."""
    return gl.where(pages > 0, pages + START, 0)


@gluon.jit
def costs(
    lengths_ptr, tiles, num_tiles, num_rows, rows_per_request, max_len,
    ROWS: gl.constexpr, RAGGED: gl.constexpr,
):  # fmt: skip
    """Of a list of tiles, 0 from num_tiles on."""
    first, stop, _ = rows_of(tiles, num_rows, rows_per_request, ROWS, RAGGED)
    stop = gl.where(tiles < num_tiles, stop, 0)
    return cost(tile_pages(lengths_ptr, first, stop, max_len, ROWS))


@gluon.jit
def program_share(
    lengths_ptr, num_tiles, num_rows, rows_per_request, max_len,
    ROWS: gl.constexpr, RAGGED: gl.constexpr, TILES: gl.constexpr, IN_TURNS: gl.constexpr,
):  # fmt: skip
    """This program's share of the costs of all tiles, counted through TILES at a time: (the tile in
    which it begins, how much of that tile others do, the share's end from the tile's begin on).

    Not IN_TURNS: TILES are all. What runs once a program is short, as each of its instructions is
    fetched for 10 to 20 clocks.
    """
    listed = gl.arange(0, TILES, LIST)
    if IN_TURNS:
        total = gl.to_tensor(0)
        for at in range(0, num_tiles, TILES):
            of_tiles = costs(
                lengths_ptr, at + listed, num_tiles, num_rows, rows_per_request, max_len,
                ROWS, RAGGED,
            )  # fmt: skip
            total += gl.sum(of_tiles, 0)
        share = gl.cdiv(total, gl.num_programs(0))
        begin = gl.program_id(0) * share
        tile = gl.to_tensor(0)
        tile_begin = gl.to_tensor(0)
        counted = gl.to_tensor(0)
        for at in range(0, num_tiles, TILES):
            of_tiles = costs(
                lengths_ptr, at + listed, num_tiles, num_rows, rows_per_request, max_len,
                ROWS, RAGGED,
            )  # fmt: skip
            ends = counted + gl.associative_scan(of_tiles, 0, add)
            before = (ends <= begin) & (at + listed < num_tiles)
            tile += gl.sum(before.to(gl.int32), 0)
            tile_begin = gl.maximum(tile_begin, gl.max(gl.where(before, ends, 0), 0))
            counted = gl.max(ends, 0)
    else:
        of_tiles = costs(
            lengths_ptr, listed, num_tiles, num_rows, rows_per_request, max_len, ROWS, RAGGED
        )
        ends = gl.associative_scan(of_tiles, 0, add)
        total = gl.max(ends, 0)
        share = gl.cdiv(total, gl.num_programs(0))
        begin = gl.program_id(0) * share
        before = (ends <= begin) & (listed < num_tiles)
        tile = gl.sum(before.to(gl.int32), 0)
        tile_begin = gl.max(gl.where(before, ends, 0), 0)
    return tile, begin - tile_begin, gl.minimum(begin + share, total) - tile_begin
