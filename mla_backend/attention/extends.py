# SPDX-License-Identifier: Apache-2.0
"""Short ends of prompts that attend like decode tokens.

A chunk of a prompt attends in expanded form: its whole context is read and multiplied by kv_b_proj,
2 * 512 * 256 FLOP a head and cached token however few the new tokens are. In absorbed form there is
nothing to expand, but a new token costs 2 * (576 + 512) instead of 2 * (192 + 128) a head and
cached token. Below 171 new tokens the absorbed form is cheaper: what is left of a prompt when its
prefix was cached or its chunks did not come out even. To the decode kernel such an end is requests
of a few new tokens, its pieces, each with the block table of the prompt and the length that its
last token may see.
"""

from typing import Any

import numpy as np
import torch
from mla_kernels.decode.plan.api import MAX_S_Q
from mla_kernels.indexer.rows import token_rows

from mla_backend import envs
from mla_backend.attention.kernel import DecodeKernel
from mla_backend.attention.shard import Shard

MOST_TOKENS = 128
# On a CPU 48 of 16 heads still pay, 64 behind long contexts only (benchmarks/versions/host.md).
MOST_TOKENS_CPU = 48
# Rows of a step beyond those that its requests have as decode requests.
MOST_ROWS = 512
# Query rows of a program of the Hopper kernel.
TILE_ROWS = 64
# Cached tokens per new one, from which expanding costs more than starting on a row of its own.
CONTEXT_PER_TOKEN = 4
# int32 in 16 bytes: kernels are compiled differently for what does not start at a multiple of them.
ALIGNED = 4

# block_table [B, max_blocks] and seq_lens [B] int32 of requests, or of pieces, and their tokens.
Launch = tuple[torch.Tensor, torch.Tensor, int]


def longest_piece(kernel: DecodeKernel, num_heads: int) -> int:
    """New tokens of a prompt's end that the kernel takes as one request, at most.

    Torch multiplies more rows at a time; the Hopper kernel fills its tile of 64 rows. Others take a
    token at a time, as do those with enough heads.
    """
    if kernel.impl == "torch":
        return MAX_S_Q
    return max(1, min(MAX_S_Q, TILE_ROWS // num_heads)) if kernel.impl == "hopper" else 1


def longest_extend(kernel: DecodeKernel, num_heads: int) -> int:
    """New tokens up to which a prompt's end attends in absorbed form; 0 = none does.

    By MLA_BACKEND_EXTEND_TOKENS. By itself not in batch-invariant mode, where the form must not
    depend on what else is in a step. On a GPU twice the rows of a piece, as rows that do not fill a
    tile of 64 pay less; on a CPU three times the heads, as thin matrices do.
    """
    asked: int | None = envs.get("MLA_BACKEND_EXTEND_TOKENS")
    if asked is not None:
        return asked
    if kernel.deterministic:
        return 0
    if kernel.impl == "torch":
        return min(MOST_TOKENS_CPU, 3 * num_heads)
    return min(MOST_TOKENS, 2 * num_heads * longest_piece(kernel, num_heads))


def pays(query_lens: np.ndarray, contexts: np.ndarray, most_s_q: int, longest: int) -> bool:
    """Whether the leading requests of at most `longest` new tokens are better absorbed.

    query_lens, contexts  [B], new and cached tokens of vLLM's reordered batch
    most_s_q              new tokens of a decode request at most
    """
    longer = query_lens > longest
    leading = int(longer.argmax()) if longer.any() else len(query_lens)
    extends = query_lens[:leading] > most_s_q
    new, cached = query_lens[:leading][extends], contexts[:leading][extends]
    # Each has the rows of a decode request anyway: those of a draft model's first step, which may
    # be one longer, fit however many they are.
    more = (new - most_s_q).sum()
    return bool(0 < more <= MOST_ROWS and cached.sum() >= CONTEXT_PER_TOKEN * new.sum())


def most_rows(max_requests: int, most_s_q: int, absorbs: bool) -> int:
    """Rows of a step at most: every request may be one of drafts that stands alone, and beside
    them there are the rows that `pays` lets in, where ends of prompts are absorbed."""
    return max_requests * most_s_q + MOST_ROWS * absorbs


def equal_run(query_lens: np.ndarray, most_s_q: int) -> int:
    """Leading requests that the kernel takes together, several tokens each; 0 if they have one
    token, as pieces of what follows may."""
    s_q = query_lens[0]
    if not 1 < s_q <= most_s_q:
        return 0
    others = query_lens != s_q
    return int(others.argmax()) if others.any() else len(query_lens)


def pieces(query_lens: np.ndarray, longest: int, taken: set[int] | None) -> list[tuple[int, int]]:
    """(number, tokens of each) of the pieces that requests of query_lens [B] tokens are cut into,
    by launch and in the order of the tokens; a launch takes pieces of one length.

    taken  lengths that another launch of the step has: a plan of each length is all that there is,
           so where two launches would need one, pieces are shorter. None: no such bound
    """
    # Each piece reads its whole context, so the longest that keep to the bound cost least.
    for most in range(longest, 1, -1):
        if launches := _cut(query_lens.tolist(), most, taken):
            return launches
    return [(int(query_lens.sum()), 1)]


def _cut(query_lens: list[int], most: int, taken: set[int] | None) -> list[tuple[int, int]]:
    """`pieces` of at most `most` tokens; none if two launches, or one and `taken`, would share a
    length."""
    launches: list[tuple[int, int]] = []
    used = None if taken is None else taken.copy()
    for length in query_lens:
        # What is left over first: behind decode tokens it is often one of them.
        for number, s_q in ((1, length % most), (length // most, most)):
            if not number or not s_q:
                continue
            if launches and launches[-1][1] == s_q:
                number += launches.pop()[0]
            elif used is not None:
                if s_q in used:
                    return []
                used.add(s_q)
            launches.append((number, s_q))
    return launches


class ExtendRows:
    """Block tables and lengths of the pieces of a step, in buffers made at start-up.

    What each launch gets begins at a multiple of 16 bytes, as what was compiled at start-up did.
    With a `shard` of several ranks lengths are the rank's, and pieces must have one token: a kernel
    masks the tokens of a piece as if all that they see followed each other.
    """

    def __init__(
        self, max_rows: int, max_blocks: int, device: torch.device, shard: Shard | None = None
    ) -> None:
        self._shard = shard or Shard()
        self._request_ids = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self._visible = torch.zeros_like(self._request_ids)
        if self._shard.size > 1:
            self._spare = torch.zeros_like(self._visible)
        # Between launches there are gaps: on a GPU one of each length, on a CPU one a piece.
        launches = max_rows if device.type == "cpu" else MAX_S_Q
        room = max_rows + (ALIGNED - 1) * launches
        self._lengths = torch.zeros(room, dtype=torch.int32, device=device)
        self._tables = torch.zeros(room, max_blocks, dtype=torch.int32, device=device)
        starts = torch.tensor([0, 1], dtype=torch.int32, device=device)
        # Compiles the kernel now, not in the first step.
        self.fill(starts, starts[:1], self._tables[1:2], 0, [(1, 1)])

    def fill(
        self,
        query_start_loc: torch.Tensor,
        seq_lens: torch.Tensor,
        block_table: torch.Tensor,
        start: int,
        launches: list[tuple[int, int]],
    ) -> list[Launch]:
        """What the `launches` that `pieces` gave take, from token `start` on. On a rank of several
        tokens may be behind the last request's, as padding of a CUDA graph: their lengths are 0.

        query_start_loc [B + 1], seq_lens [B] (the new tokens included) and block_table
        [B, max_blocks] are those of the requests, int32 on the device. No sync, no allocation.
        ValueError for more tokens than there is room for.
        """
        stop = start + sum(number * s_q for number, s_q in launches)
        if stop > len(self._visible):
            raise ValueError(f"Expected at most {len(self._visible)} decode tokens, got {stop}")
        request_ids, visible = self._request_ids[:stop], self._visible[:stop]
        token_rows(query_start_loc, seq_lens, request_ids=request_ids, lengths=visible)
        if self._shard.size > 1:
            self._shard.lengths(visible, out=visible, spare=self._spare[:stop])
            request_ids.clamp_(min=0)  # of tokens of no request, whose table is not read
        # vLLM's tables may be wider than ours, by columns that no request reaches.
        block_table = block_table[:, : self._tables.shape[1]]
        filled, row = [], 0
        for number, s_q in launches:
            last = slice(start + s_q - 1, start + number * s_q, s_q)
            tables = self._tables[row : row + number, : block_table.shape[1]]
            torch.index_select(block_table, 0, request_ids[last], out=tables)
            lengths = self._lengths[row : row + number].copy_(visible[last])
            filled.append((tables, lengths, number * s_q))
            start += number * s_q
            row += -(-number // ALIGNED) * ALIGNED
        return filled


def host_lengths(common: Any, added: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """New and cached tokens [B] of a step, from the host's copies in vLLM's
    CommonAttentionMetadata, of whose lengths a drafter's first step may lack `added` tokens. Drafts
    that were refused count as cached: an upper bound, which is also what vLLM takes for the
    contexts of prompts."""
    query_lens = np.diff(common.query_start_loc_cpu.numpy())
    seq_lens = common.seq_lens_cpu_upper_bound.numpy()[: len(query_lens)]
    cached = np.maximum(seq_lens + added - query_lens, 0)  # a drafter's steps may be longer
    return query_lens, cached
