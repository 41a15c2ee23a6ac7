# SPDX-License-Identifier: Apache-2.0
"""Prefill on CPU: attention of new tokens over whole contexts, read from the pages.

The pages already hold the new tokens when attention runs, so a fresh prompt, a chunk of a prompt
and a prefix-cache hit are the same computation (DeepSeek-V2, arXiv:2405.04434, section 2.1.2,
without absorption): gather latent rows, expand them to keys and values with kv_b_proj, attend.

Contexts are cut into tiles of bounded size, so that memory for expanded keys and values is
bounded too; a tile may hold several requests, a request may span several tiles.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn.functional import pad

# Tokens expanded at once. 8192 tokens x 16 heads x (192 + 192) x 4 bytes = 200 MB in fp32.
MAX_TILE_TOKENS = 8192


@dataclass(frozen=True)
class PrefillPiece:
    """One attention call: query rows `q` against rows `k` of the tile.

    `causal` pieces are square (the new tokens among themselves); the others see all of `k`.
    Pieces of one request follow each other; `first` and `last` mark its ends.
    """

    q: slice
    k: slice
    causal: bool
    first: bool
    last: bool


@dataclass(frozen=True)
class PrefillTile:
    """Cache rows to expand together: `slots` [n] int64 (block * block_size + offset)."""

    slots: torch.Tensor
    pieces: list[PrefillPiece]


def plan_prefill(
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    block_size: int,
    max_tile_tokens: int = MAX_TILE_TOKENS,
) -> list[PrefillTile]:
    """Cut the contexts of R prefill requests into tiles of at most `max_tile_tokens` rows.

    block_table [R, max_blocks] int32; query_start_loc [R + 1] int32, starting at 0; seq_lens [R]
    int32, new tokens included. The new tokens of one request stay in one tile even if they are
    more than `max_tile_tokens`. All tensors on CPU.
    """
    tiles: list[PrefillTile] = []
    slots: list[torch.Tensor] = []
    pieces: list[PrefillPiece] = []
    used = 0

    def close_tile() -> None:
        nonlocal slots, pieces, used
        if pieces:
            tiles.append(PrefillTile(torch.cat(slots), pieces))
        slots, pieces, used = [], [], 0

    starts = query_start_loc.tolist()
    for r, seq_len in enumerate(seq_lens.tolist()):
        q = slice(starts[r], starts[r + 1])
        context = seq_len - (q.stop - q.start)
        position = 0
        while position < seq_len:
            causal = position >= context
            end = seq_len if causal else min(context, position + max_tile_tokens - used)
            if end <= position or (used and used + end - position > max_tile_tokens):
                close_tile()
                continue
            positions = torch.arange(position, end)
            blocks = block_table[r, positions // block_size].long()
            slots.append(blocks * block_size + positions % block_size)
            k = slice(used, used + end - position)
            pieces.append(PrefillPiece(q, k, causal, position == 0, end == seq_len))
            used, position = k.stop, end
    close_tile()
    return tiles


def run_prefill(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    tiles: list[PrefillTile],
    expand: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
    *,
    scale: float,
    out: torch.Tensor,
) -> None:
    """Attention of all prefill tokens, written to `out`.

    q [T, H, Dqk]; kv_cache [num_blocks, block_size, Dk]; `expand` turns n cache rows [n, Dk] into
    keys [n, H, Dqk] and values [n, H, Dv] in q.dtype; out [T, H, Dv].
    """
    rows = kv_cache.view(-1, kv_cache.shape[-1])
    so_far: tuple[torch.Tensor, torch.Tensor] | None = None
    for tile in tiles:
        k, v = expand(rows[tile.slots])
        for piece in tile.pieces:
            part = _attend(q[piece.q], k[piece.k], v[piece.k], scale, piece.causal)
            so_far = part if piece.first or so_far is None else _merge(so_far, part)
            if piece.last:
                out[piece.q] = so_far[0].transpose(0, 1)


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """out [H, m, Dv], lse [H, m] (natural log) of q [m, H, D] over k [n, H, D], v [n, H, Dv].

    The operator under `scaled_dot_product_attention`, called directly because only it returns
    the lse. It wants one width for q, k and v; zeros change neither scores nor output.
    """
    Dv, D = v.shape[-1], max(q.shape[-1], v.shape[-1])
    q, k, v = (
        (x if x.shape[-1] == D else pad(x, (0, D - x.shape[-1]))).transpose(0, 1)[None]
        for x in (q, k, v)
    )
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, causal, scale=scale
    )
    return out[0, ..., :Dv], lse[0]


def _merge(
    a: tuple[torch.Tensor, torch.Tensor], b: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over the union of two disjoint sets of keys, in fp32."""
    lse = torch.logaddexp(a[1], b[1])
    weights = [torch.exp(part[1] - lse)[..., None] for part in (a, b)]
    return a[0].float() * weights[0] + b[0].float() * weights[1], lse
