# SPDX-License-Identifier: Apache-2.0
"""The cache rows of a tile, gathered by the block table."""

import torch

from mla_kernels.decode.torch_scratch import scratch
from mla_kernels.decode.torch_tiles import Tile


def gather(
    tile: Tile, words: torch.Tensor, block_table: torch.Tensor, seq_lens: torch.Tensor
) -> torch.Tensor:
    """The tile's cache rows [requests, tokens, words]; rows that no query uses are zero bytes."""
    block_size = words.shape[1]
    first, last = tile.first // block_size, -(-tile.end // block_size)
    pages = block_table[tile.start : tile.stop, first:last]
    if tile.whole == tile.stop:
        rows = _select(words, pages)
    else:
        token = torch.arange(first * block_size, last * block_size, device=pages.device)
        unused = token >= seq_lens[tile.start : tile.stop, None]
        # Entries past a request's end may hold anything; block 0 stands in for them.
        pages = pages.masked_fill(unused[:, ::block_size], 0)
        rows = _select(words, pages)
        _zero_rows(rows.flatten(0, 1), unused.flatten())  # 0 * NaN would reach the output
    rows = rows.view(tile.stop - tile.start, -1, words.shape[2])
    return rows if rows.shape[1] == tile.end - tile.first else rows[:, : tile.end - tile.first]


def _select(words: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
    index = pages.reshape(-1)
    if words.device.type != "cpu":
        return words.index_select(0, index)
    rows = scratch("rows", (len(index), *words.shape[1:]), words.dtype)
    return torch.index_select(words, 0, index, out=rows)


def _zero_rows(rows: torch.Tensor, which: torch.Tensor) -> None:
    if rows.device.type == "cpu":  # many times faster than the masked fill
        rows.index_fill_(0, which.nonzero().squeeze(1), 0)
    else:
        rows.masked_fill_(which[:, None], 0)
