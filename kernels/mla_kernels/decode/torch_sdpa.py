# SPDX-License-Identifier: Apache-2.0
"""`rescale="flash"` on a CPU: the operator under torch's `scaled_dot_product_attention`.

It takes keys as they lie in memory, so the rows of requests of like length are gathered first and
attended to in one call. Where requests are much fewer than threads, each is cut into parts, which
are merged by their lse (FlashDecoding): in fp32, so that nothing is rounded twice.
"""

from collections.abc import Iterator

import torch

from mla_kernels.cache.rows import as_words, rows_as_float
from mla_kernels.decode.torch_gather import gather
from mla_kernels.decode.torch_scratch import scratch
from mla_kernels.decode.torch_tiles import Tile, tile_of

# Cache rows gathered for one call, unless one request has more: 75 MB in fp32, memory that is kept
# for the next call (torch_scratch.py). Beyond what is kept a row took 2.4 times as long.
MOST_ROWS = 2**15
# What a request may be shorter than the longest of its call, which costs what a call costs besides.
MOST_PADDING = 128
# Tokens of a part, and parts of a request, at least: two threads gain nothing by two parts in fp32.
LEAST_PART = 1024
LEAST_PARTS = 3
# With fewer keys the operator takes scores that are all NaN for none: out and lse are 0.
LEAST_KEYS_FOR_NAN = 16
# Query rows of a group that the operator gives to one thread.
ROWS_OF_A_THREAD = 32
# With as many heads the keys are prepared for each new token of a request: a mask of one row each.
HEADS_OF_A_GROUP = 32


def attend_by_sdpa(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    tiles: Iterator[Tile],
    *,
    scale: float,
    kv_lora_rank: int,
    kv_scale: float | torch.Tensor | None,
    hidden: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out [B, s_q, H, kv_lora_rank] in q.dtype, lse [B, s_q, H] fp32), as `mla_decode` defines
    them.

    tiles   from `calls` or `one_call`
    hidden  newest tokens that the first query does not see
    """
    B, s_q, H, Dk = q.shape
    if not B:
        return q.new_empty(0, s_q, H, kv_lora_rank), q.new_empty(0, s_q, H, dtype=torch.float32)
    if q.stride(-1) != 1:  # the operator does not look
        q = q.contiguous()
    # Queries of one token see as many keys: with enough heads they are a group of their own, whose
    # mask is one row; the operator prepares the keys for each group.
    groups = s_q if hidden and H >= HEADS_OF_A_GROUP else 1
    queries, words = q.reshape(B, groups, -1, Dk), as_words(kv_cache)
    limits = seq_lens[:, None]  # how many tokens a query sees
    if hidden:
        limits = limits - hidden + torch.arange(s_q, device="cpu")
    limits = limits.view(B, groups, -1)
    out = q.new_empty(*queries.shape[:3], kv_lora_rank)
    lse = q.new_full(queries.shape[:3], -torch.inf, dtype=torch.float32)
    attended = 0  # the rest is empty
    for tile in tiles:
        requests = slice(tile.start, tile.stop)
        rows = gather(tile, words, block_table, seq_lens).view(kv_cache.dtype)
        keys = rows_as_float(rows, q.dtype, kv_lora_rank, Dk, kv_scale)
        limit = limits[requests] if tile.whole < tile.stop else None
        found, found_lse = attend_in_call(queries[requests], keys, limit, scale)
        out[requests] = found[..., :kv_lora_rank]
        lse[requests] = found_lse
        attended = tile.stop
    out[attended:] = 0
    return out.view(B, s_q, H, kv_lora_rank), lse.view(B, s_q, H)


def at_once(longest: int) -> int:
    """How many requests threads attend to side by side, each to one."""
    return min(torch.get_num_threads(), max(MOST_ROWS // longest, 1))


def one_call(lengths: list[int], hidden: int) -> Tile | None:
    """All requests as they come, where that is one call; then nothing needs to be sorted."""
    longest, stop = max(lengths, default=0), len(lengths)
    if longest == 0 or (stop > 1 and stop * longest > MOST_ROWS):
        return None
    least = longest / 2 if stop <= at_once(longest) else longest - MOST_PADDING
    if min(lengths) < least:
        return None
    whole = stop if hidden == 0 and min(lengths) == longest else 0
    return Tile(0, stop, whole, 0, longest)


def calls(lengths: list[int], hidden: int) -> Iterator[Tile]:
    """Tiles of whole requests, `lengths` in descending order; empty ones are in none.

    A call takes rounds of a request a thread. In a round others may be down to half as long: alone
    they would leave threads idle.
    """
    count, start = len(lengths) - lengths.count(0), 0
    while start < count:
        longest, stop = lengths[start], start
        threads = at_once(longest)
        while stop < count and longest - lengths[stop] <= MOST_PADDING:
            last = min(stop + threads, count)
            if stop > start and (last - start) * longest > MOST_ROWS:
                break
            stop += 1
            while stop < last and 2 * lengths[stop] >= longest:
                stop += 1
        yield tile_of(lengths, start, stop, 0, longest, hidden)
        start = stop


def attend_in_call(
    q: torch.Tensor, keys: torch.Tensor, limit: torch.Tensor | None, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """out [b, G, R, Dk], lse [b, G, R] of q [b, G, R, Dk] and keys [b, N, Dk], which are as wide as
    the values here because the operator wants them so.

    limit  [b, G, n]: how many of the keys the rows of each of n equal parts see; None: all
    """
    parts = parts_of(q.shape, keys.shape[1])
    if parts == 1:
        return _attend(q, keys, limit, scale)
    return _attend_in_parts(q, keys, limit, scale, parts)


def parts_of(queries: torch.Size, tokens: int) -> int:
    """Into how many parts each request of a call is cut, of queries [b, G, R, Dk]: what the
    operator, which shares out requests and rows, leaves idle."""
    b, groups, rows, _ = queries
    shared = b * groups * -(-rows // ROWS_OF_A_THREAD)
    parts = min(torch.get_num_threads() // shared, tokens // LEAST_PART)
    return parts if parts >= LEAST_PARTS else 1


def _attend(
    q: torch.Tensor, keys: torch.Tensor, limit: torch.Tensor | None, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`attend_in_call` in one."""
    b, groups = q.shape[:2]
    if groups > 1 and b * groups * keys.shape[1] > MOST_ROWS:
        # One at a time: the operator makes a copy of the keys for each.
        limits = [None] * groups if limit is None else limit.split(1, 1)
        each = zip(q.split(1, 1), limits, strict=True)
        outs, lses = zip(*(_attend(a, keys, some, scale) for a, some in each), strict=True)
        return torch.cat(outs, 1), torch.cat(lses, 1)
    mask = None
    if limit is not None:
        unseen = torch.arange(keys.shape[1], device="cpu") >= limit[..., None]
        mask = torch.zeros_like(unseen, dtype=torch.float32).masked_fill_(unseen, -torch.inf)
        if limit.shape[2] > 1:
            mask = mask.repeat_interleave(q.shape[2] // limit.shape[2], 2)
    keys = keys[:, None].expand(-1, q.shape[1], -1, -1)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, keys, keys, 0.0, False, attn_mask=mask, scale=scale
    )
    if keys.shape[2] < LEAST_KEYS_FOR_NAN:
        scores = q.float() @ keys.float().mT
        if mask is not None:
            scores.masked_fill_(mask == -torch.inf, 0.0)
        unknown = scores.isnan().any(-1)
        out = out.masked_fill(unknown[..., None], torch.nan)
        lse = lse.masked_fill(unknown, torch.nan)
    endless = lse == torch.inf  # a score of +inf: the operator's output is 0
    if endless.any():
        out = out.masked_fill(endless[..., None], torch.nan)
        lse = lse.masked_fill(endless, torch.nan)
    if limit is not None:  # of a row that sees nothing the operator's lse is 0
        nothing = (limit <= 0).repeat_interleave(q.shape[2] // limit.shape[2], 2)
        lse = lse.masked_fill(nothing, -torch.inf)
        if nothing.any():  # of a NaN in its query the operator's output is NaN
            out = out.masked_fill(nothing[..., None], 0.0)
    weightless = _weightless(q, keys, mask, scale, out, lse)
    if weightless is not None:
        lse = lse.masked_fill(weightless, -torch.inf)
    return out, lse


def _weightless(
    q: torch.Tensor,
    keys: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> torch.Tensor | None:
    """Rows [b, G, R] whose scores are all -inf, of which the operator's lse is 0; None if no row
    can be one. One token of a cache of zeros looks like them, but for its score."""
    if not (lse == 0).any():
        return None
    empty = (lse == 0) & ~out.any(-1)
    if not empty.any():
        return None
    scores = (q.float() @ keys.float().mT) * scale
    if mask is not None:
        scores.masked_fill_(mask == -torch.inf, -torch.inf)
    return empty & (scores.amax(-1) == -torch.inf)


def _attend_in_parts(
    q: torch.Tensor, keys: torch.Tensor, limit: torch.Tensor | None, scale: float, parts: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `_attend`, in fp32, the keys cut into `parts`."""
    (b, G, R, D), N = q.shape, keys.shape[1]
    width = -(-N // parts)
    padded = scratch("keys", (b, parts * width, D), torch.float32)
    padded[:, :N].copy_(keys)
    padded[:, N:].zero_()
    if limit is None:
        limit = torch.full((b, 1, 1), N, device="cpu")
    part = torch.arange(parts, device="cpu")[:, None, None]
    in_part = limit[:, None] - width * part  # [b, parts, G, n]
    out, lse = _attend(
        q.float()[:, None].expand(b, parts, G, R, D).flatten(0, 1),
        padded.view(b * parts, width, D),
        in_part.flatten(0, 1),
        scale,
    )
    out, lse = out.unflatten(0, (b, parts)), lse.unflatten(0, (b, parts))
    merged = lse.logsumexp(1)
    weights = (lse - merged[:, None]).exp_().masked_fill_((merged == -torch.inf)[:, None], 0.0)
    return (weights[..., None] * out).sum(1), merged
