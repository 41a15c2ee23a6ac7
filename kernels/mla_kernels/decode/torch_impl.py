# SPDX-License-Identifier: Apache-2.0
"""MLA decode in torch: batched over requests, the cache gathered in chunks of tokens."""

import torch

from mla_kernels.cache.rows import rows_as_float
from mla_kernels.decode.rescale import STEPS, finish, scale_to_log2, start

# Bytes of gathered fp32 rows held at a time: they stay in the last-level cache between the gather
# and the two matrix products.
CHUNK_BYTES = 8 * 2**20
DETERMINISTIC_CHUNK = 512  # tokens


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
    chunk_tokens: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out [B, s_q, H, kv_lora_rank] fp32, lse [B, s_q, H] fp32).

    Tokens are taken `chunk_tokens` at a time (default: by CHUNK_BYTES; a fixed number with
    `deterministic`). With rescale "pow2" and 16-bit caches the result does not depend on it.
    """
    if deterministic:
        chunk_tokens = DETERMINISTIC_CHUNK
    B, s_q, H, Dk = q.shape
    block_size = kv_cache.shape[1]
    blocks, common = _extent(block_table, seq_lens, block_size)
    step_blocks = _chunk_blocks(chunk_tokens, B * Dk * 4, block_size)
    step = STEPS[rescale]
    scale_log2 = scale_to_log2(scale)
    queries = q.reshape(B, s_q * H, Dk).float()
    limit = _limits(seq_lens, s_q, causal).repeat_interleave(H, dim=1)[..., None]
    state = start((B, s_q * H), kv_lora_rank, q.device)
    for first in range(0, blocks, step_blocks):
        last = min(first + step_blocks, blocks)
        token = torch.arange(first * block_size, last * block_size, device=q.device)
        unused = token >= seq_lens[:, None]
        # Entries past a request's end may hold anything; block 0 stands in for them.
        pages = block_table[:, first:last].masked_fill(unused[:, ::block_size], 0)
        rows = kv_cache.index_select(0, pages.flatten())
        rows = rows.view(B, -1, rows.shape[-1])
        keys = rows_as_float(rows, q.dtype, kv_lora_rank, Dk, kv_scale).float()
        if last * block_size > common:
            keys.masked_fill_(unused[..., None], 0.0)  # 0 * NaN would reach the output
        qk = torch.bmm(queries, keys.mT).masked_fill_(token >= limit, -torch.inf)
        state = step(state, qk, keys[..., :kv_lora_rank], scale_log2, q.dtype)
    out, lse = finish(state, rescale, q.dtype)
    return out.view(B, s_q, H, kv_lora_rank), lse.view(B, s_q, H)


def _limits(seq_lens: torch.Tensor, s_q: int, causal: bool) -> torch.Tensor:
    """[B, s_q]: query j of a request sees the keys below its limit."""
    limit = seq_lens[:, None].expand(-1, s_q)
    if causal:
        limit = limit - (s_q - 1) + torch.arange(s_q, device=seq_lens.device)
    return limit


def _extent(block_table: torch.Tensor, seq_lens: torch.Tensor, block_size: int) -> tuple[int, int]:
    """(columns of the table to walk, tokens that every request has). On the CPU by the lengths;
    elsewhere they are on the device, so all columns and none."""
    if block_table.numel() == 0:
        return 0, 0
    if block_table.device.type != "cpu":
        return block_table.shape[1], 0
    shortest, longest = torch.aminmax(seq_lens)
    return min(block_table.shape[1], -(-int(longest) // block_size)), int(shortest)


def _chunk_blocks(chunk_tokens: int | None, bytes_per_token: int, block_size: int) -> int:
    tokens = chunk_tokens or max(CHUNK_BYTES // max(bytes_per_token, 1) // 64, 1) * 64
    return max(tokens // block_size, 1)
