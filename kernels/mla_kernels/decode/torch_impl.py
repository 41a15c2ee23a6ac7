# SPDX-License-Identifier: Apache-2.0
"""MLA decode in torch: batched over requests, the cache gathered tile by tile.

On a CPU the lengths are read and the tiles follow them (torch_tiles.py). Elsewhere nothing is read
back from the device: every request walks its whole table row, masked.
"""

from collections.abc import Iterator

import torch
from torch.nn.functional import pad

from mla_kernels.cache.rows import as_words, rows_as_float
from mla_kernels.decode.rescale import FOLD, STEPS, finish, scale_to_log2, start
from mla_kernels.decode.torch_scratch import scratch
from mla_kernels.decode.torch_tiles import TILE_TOKENS, Tile, tiles_by_length, tiles_of_all

DEVICE_TILE_TOKENS = 2**15


@torch.no_grad()
def mla_decode_torch(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float,
    kv_lora_rank: int,
    kv_scale: float | torch.Tensor | None,
    causal: bool,
    rescale: str,
    deterministic: bool = False,
    tile_tokens: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out [B, s_q, H, kv_lora_rank] fp32, lse [B, s_q, H] fp32).

    A tile holds about `tile_tokens` tokens. With rescale "pow2" and 16-bit rows the result depends
    on that only as far as products of other shapes are added up in another order: MKL on several
    threads does so. `deterministic` takes requests one by one, so that all products of a request
    have the shapes that they have when it is alone.
    """
    B, s_q, H, Dk = q.shape
    if deterministic and B > 1:
        per_request = (x.split(1) for x in (q, block_table, seq_lens))
        alone = [
            mla_decode_torch(
                a_q,
                kv_cache,
                a_table,
                a_length,
                scale=scale,
                kv_lora_rank=kv_lora_rank,
                kv_scale=kv_scale,
                causal=causal,
                rescale=rescale,
                deterministic=True,
                tile_tokens=tile_tokens,
            )
            for a_q, a_table, a_length in zip(*per_request, strict=True)
        ]
        outs, lses = zip(*alone, strict=True)
        return torch.cat(outs), torch.cat(lses)
    block_size = kv_cache.shape[1]
    unit = max(FOLD, block_size)
    hidden = s_q - 1 if causal else 0
    order: torch.Tensor | None = None
    tiles: Iterator[Tile]
    if q.device.type == "cpu":
        lengths = seq_lens.tolist()
        capacity = block_table.shape[1] * block_size
        if lengths and not 0 <= min(lengths) <= max(lengths) <= capacity:
            raise IndexError(f"lengths {lengths} of a block table for {capacity} tokens")
        if lengths != sorted(lengths, reverse=True):
            order = torch.argsort(seq_lens, descending=True, stable=True)
            q, block_table, seq_lens = q[order], block_table[order], seq_lens[order]
            lengths = seq_lens.tolist()
        tokens = tile_tokens or TILE_TOKENS * torch.get_num_threads()
        tiles = tiles_by_length(lengths, hidden=hidden, unit=unit, tokens=tokens)
    else:
        tokens = tile_tokens or DEVICE_TILE_TOKENS
        if deterministic:  # the table's width, unlike `unit`, depends on the other requests
            tokens = unit
            block_table = pad(block_table, (0, -block_table.shape[1] % (unit // block_size)))
        capacity = block_table.shape[1] * block_size
        tiles = tiles_of_all(B, capacity, unit=unit, tokens=tokens)

    queries = q.reshape(B, s_q * H, Dk).float()
    state = start((B, s_q * H), kv_lora_rank, q.device)
    scale_log2 = scale_to_log2(scale)
    words = as_words(kv_cache)
    for tile in tiles:
        some, part = queries, state
        if tile.stop - tile.start < B:
            requests = slice(tile.start, tile.stop)
            some, part = queries[requests], state[requests]
        rows = _gather(tile, words, block_table, seq_lens).view(kv_cache.dtype)
        keys = _fp32(rows_as_float(rows, q.dtype, kv_lora_rank, Dk, kv_scale))
        qk = torch.bmm(some, keys.mT)
        if tile.whole < tile.stop:
            _mask(qk[tile.whole - tile.start :], tile, seq_lens, s_q, hidden)
        values = keys.narrow(-1, 0, kv_lora_rank)
        STEPS[rescale](part, qk, values, scale_log2, q.dtype, first=tile.first == 0)
    out, lse = finish(state, rescale, q.dtype)
    if order is not None:
        inverse = torch.argsort(order)
        out, lse = out[inverse], lse[inverse]
    return out.view(B, s_q, H, kv_lora_rank), lse.view(B, s_q, H)


def _gather(
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


def _fp32(keys: torch.Tensor) -> torch.Tensor:
    if keys.device.type != "cpu" or keys.dtype == torch.float32:
        return keys.float()
    return scratch("keys", tuple(keys.shape), torch.float32).copy_(keys)


def _mask(qk: torch.Tensor, tile: Tile, seq_lens: torch.Tensor, s_q: int, hidden: int) -> None:
    """-inf where query j of a request may not see a token: at seq_len - hidden + j and after."""
    limit = seq_lens[tile.whole : tile.stop, None] - hidden
    if hidden:
        limit = limit + torch.arange(s_q, device=qk.device)
    token = torch.arange(tile.first, tile.end, device=qk.device)
    masked = token >= limit[..., None, None]
    qk.view(len(qk), s_q, -1, qk.shape[-1]).masked_fill_(masked, -torch.inf)


def _zero_rows(rows: torch.Tensor, which: torch.Tensor) -> None:
    if rows.device.type == "cpu":  # many times faster than the masked fill
        rows.index_fill_(0, which.nonzero().squeeze(1), 0)
    else:
        rows.masked_fill_(which[:, None], 0)
