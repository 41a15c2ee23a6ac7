# SPDX-License-Identifier: Apache-2.0
"""Which cache tokens of which requests the torch decode takes together."""

from collections.abc import Iterator
from dataclasses import dataclass

# Tokens in a tile, per thread: their rows (2.4 MB in fp32) stay in a core's share of the cache
# between the gather and the two matrix products.
TILE_TOKENS = 1024


@dataclass(frozen=True)
class Tile:
    """Tokens [first, end) of requests [start, stop).

    Requests [start, whole) have all of these tokens, and all their queries see them; what is
    unused or masked lies in requests [whole, stop).
    """

    start: int
    stop: int
    whole: int
    first: int
    end: int


def tiles_by_length(
    lengths: list[int], *, hidden: int, unit: int, tokens: int, fixed: bool
) -> Iterator[Tile]:
    """Tiles of requests sorted by length, longest first, about `tokens` tokens each.

    Requests of like length go together, and a request leaves when its tokens are used up, so little
    is computed for nothing. hidden: newest tokens that the first query does not see. unit: what
    `first` is a multiple of. fixed: tiles of `unit` tokens, whatever the lengths.
    """
    most = max(tokens // unit, 1)
    for start in range(0, len(lengths), most):
        stop = min(start + most, len(lengths))
        first = 0
        while True:
            while stop > start and lengths[stop - 1] <= first:
                stop -= 1
            if stop == start:
                break
            units = 1 if fixed else max(most // (stop - start), 1)
            end = first + units * unit
            if not fixed:
                end = min(end, lengths[start])
            whole = stop
            while whole > start and lengths[whole - 1] - hidden < end:
                whole -= 1
            yield Tile(start, stop, whole, first, end)
            first = end


def tiles_of_all(num_requests: int, capacity: int, *, unit: int, tokens: int) -> Iterator[Tile]:
    """Tiles that hold every request: for lengths that only the device knows."""
    step = max(tokens // (num_requests * unit), 1) * unit
    for first in range(0, capacity, step):
        yield Tile(0, num_requests, 0, first, min(first + step, capacity))
