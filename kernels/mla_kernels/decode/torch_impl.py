# SPDX-License-Identifier: Apache-2.0
"""MLA decode in torch: batched over requests, the cache gathered tile by tile.

On a CPU the lengths are read and the tiles follow them (torch_tiles.py); "flash" is calls of
torch's own operator there (torch_sdpa.py). Elsewhere nothing is read back from the device: every
request walks its whole table row, masked.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.functional import pad

from mla_kernels.cache.rows import as_words, rows_as_float
from mla_kernels.checks import FLOAT_DTYPES
from mla_kernels.decode.rescale import FOLD, STEPS, finish, scale_to_log2, start
from mla_kernels.decode.torch_gather import gather
from mla_kernels.decode.torch_scratch import scratch
from mla_kernels.decode.torch_sdpa import attend_by_sdpa, calls, one_call
from mla_kernels.decode.torch_tiles import TILE_TOKENS, Tile, tiles_by_length, tiles_of_all
from mla_kernels.torch_modes import without_modes

DEVICE_TILE_TOKENS = 2**15


@without_modes
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
    """(out [B, s_q, H, kv_lora_rank] fp32 or in q.dtype, lse [B, s_q, H] fp32).

    A tile holds about `tile_tokens` tokens. With rescale "pow2" and bf16 rows the result depends on
    that only as far as products of other shapes are added up in another order: MKL on several
    threads does so. `deterministic` takes requests one by one, so that all products of a request
    have the shapes that they have when it is alone.
    """
    named: dict[str, Any] = {"scale": scale, "kv_lora_rank": kv_lora_rank, "kv_scale": kv_scale}
    named |= {"hidden": q.shape[1] - 1 if causal else 0, "rescale": rescale}
    attend = _attend_on_cpu if q.device.type == "cpu" else _attend_unread
    if not deterministic:
        return attend(q, kv_cache, block_table, seq_lens, tile_tokens, **named)
    if attend is _attend_unread:
        # Tiles of one width: that of the table depends on the other requests.
        tile_tokens = max(FOLD, kv_cache.shape[1])
        blocks = tile_tokens // kv_cache.shape[1]
        block_table = pad(block_table, (0, -block_table.shape[1] % blocks))
    # Copies with an address and strides of their own: torch's products of fp32 depend on q's.
    queries = (a.clone(memory_format=torch.contiguous_format) for a in q.split(1))
    requests = zip(queries, block_table.split(1), seq_lens.split(1), strict=True)
    alone = [attend(a, kv_cache, table, n, tile_tokens, **named) for a, table, n in requests]
    outs, lses = zip(*alone, strict=True)
    return torch.cat(outs), torch.cat(lses)


def _attend_on_cpu(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    tile_tokens: int | None,
    *,
    rescale: str,
    **named: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tiles by the requests' lengths."""
    lengths = seq_lens.tolist()
    capacity = block_table.shape[1] * kv_cache.shape[1]
    if lengths and not 0 <= min(lengths) <= max(lengths) <= capacity:
        raise IndexError(f"lengths {lengths} of a block table for {capacity} tokens")
    hidden = named["hidden"]  # newest tokens that the first query does not see
    by_sdpa = rescale == "flash" and q.dtype in FLOAT_DTYPES
    if by_sdpa and (call := one_call(lengths, hidden)):
        return attend_by_sdpa(q, kv_cache, block_table, seq_lens, iter([call]), **named)
    order: torch.Tensor | None = None
    if lengths != sorted(lengths, reverse=True):
        order = torch.argsort(seq_lens, descending=True, stable=True)
        q, block_table, seq_lens = q[order], block_table[order], seq_lens[order]
        lengths = seq_lens.tolist()
    batch = (q, kv_cache, block_table, seq_lens)
    if by_sdpa:
        out, lse = attend_by_sdpa(*batch, calls(lengths, hidden), **named)
    else:
        tokens = tile_tokens or TILE_TOKENS * torch.get_num_threads()
        unit = max(FOLD, kv_cache.shape[1])
        tiles = tiles_by_length(lengths, hidden=hidden, unit=unit, tokens=tokens)
        out, lse = _attend_by_tiles(*batch, tiles, rescale=rescale, **named)
    if order is not None:
        inverse = torch.argsort(order)
        out, lse = out[inverse], lse[inverse]
    return out, lse


def _attend_unread(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    tile_tokens: int | None,
    **named: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Every request walks its whole table row: the lengths stay on the device."""
    B, block_size = len(q), kv_cache.shape[1]
    capacity = block_table.shape[1] * block_size
    tokens = tile_tokens or DEVICE_TILE_TOKENS
    tiles = tiles_of_all(B, capacity, unit=max(FOLD, block_size), tokens=tokens)
    return _attend_by_tiles(q, kv_cache, block_table, seq_lens, tiles, **named)


def _attend_by_tiles(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    tiles: Iterator[Tile],
    *,
    rescale: str,
    scale: float,
    kv_lora_rank: int,
    kv_scale: float | torch.Tensor | None,
    hidden: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) as `mla_decode_torch` returns them; hidden: newest tokens that the first query
    does not see."""
    B, s_q, H, Dk = q.shape
    queries = q.reshape(B, s_q * H, Dk).float()
    state = start((B, s_q * H), kv_lora_rank, q.device)
    scale_log2 = scale_to_log2(scale)
    words = as_words(kv_cache)
    for tile in tiles:
        some, part = queries, state
        if tile.stop - tile.start < B:
            requests = slice(tile.start, tile.stop)
            some, part = queries[requests], state[requests]
        rows = gather(tile, words, block_table, seq_lens).view(kv_cache.dtype)
        keys = _fp32(rows_as_float(rows, q.dtype, kv_lora_rank, Dk, kv_scale))
        qk = torch.bmm(some, keys.mT)
        if tile.whole < tile.stop:
            _mask(qk[tile.whole - tile.start :], tile, seq_lens, s_q, hidden)
        values = keys.narrow(-1, 0, kv_lora_rank)
        STEPS[rescale](part, qk, values, scale_log2, q.dtype, first=tile.first == 0)
    out, lse = finish(state, rescale, q.dtype)
    return out.view(B, s_q, H, kv_lora_rank), lse.view(B, s_q, H)


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
