# SPDX-License-Identifier: Apache-2.0
"""Which cache tokens of which requests the torch decode takes together."""

from collections.abc import Iterator
from dataclasses import dataclass

# Tokens in a tile, per thread. Their rows, 4.7 MB in fp32, stay in the last-level cache between the
# gather and the two matrix products; smaller tiles pay more for calls than they save on memory.
TILE_TOKENS = 2048
# What the calls of a tile cost, in units of one request.
TILE_COST = 3


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


def tiles_by_length(lengths: list[int], *, hidden: int, unit: int, tokens: int) -> Iterator[Tile]:
    """Tiles of requests sorted by length, longest first, about `tokens` tokens each.

    Requests of like length go together, and a request leaves when its tokens are used up, so little
    is computed for nothing. hidden: newest tokens that the first query does not see. unit: what
    `first` is a multiple of.
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
            units = best_units(lengths[start:stop], first, unit, most)
            end = min(first + units * unit, lengths[start])
            yield tile_of(lengths, start, stop, first, end, hidden)
            first = end


def tile_of(lengths: list[int], start: int, stop: int, first: int, end: int, hidden: int) -> Tile:
    """The tile with these bounds of requests whose `lengths` descend."""
    whole = stop
    while whole > start and lengths[whole - 1] - hidden < end:
        whole -= 1
    return Tile(start, stop, whole, first, end)


def best_units(lengths: list[int], first: int, unit: int, most: int) -> int:
    """How many units wide the tile at `first` is: most work of use for its cost, which is that of
    all its requests up to its end or that of the longest, and of the calls that a tile makes."""
    left = lengths[0] - first
    all_fit = left * len(lengths) <= most * unit
    widest = -(-left // unit) if all_fit else max(most // len(lengths), 1)
    if lengths[0] == lengths[-1]:  # nothing is computed for nothing
        return widest
    best, best_yield = 1, 0.0
    for units in range(1, widest + 1):
        useful = sum(min(n - first, units * unit) for n in lengths)
        cost = min(units * unit, left) * len(lengths) + TILE_COST * unit
        if useful > best_yield * cost:
            best, best_yield = units, useful / cost
    return best


def tiles_of_all(num_requests: int, capacity: int, *, unit: int, tokens: int) -> Iterator[Tile]:
    """Tiles that hold every request: for lengths that only the device knows."""
    step = max(tokens // (num_requests * unit), 1) * unit
    for first in range(0, capacity, step):
        yield Tile(0, num_requests, 0, first, min(first + step, capacity))
