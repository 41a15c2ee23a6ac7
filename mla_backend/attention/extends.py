# SPDX-License-Identifier: Apache-2.0
"""Short ends of prompts that attend like decode tokens.

A chunk of a prompt attends in expanded form: its whole context is read and multiplied by kv_b_proj,
2 * 512 * 256 FLOP a head and cached token however few the new tokens are. In absorbed form there is
nothing to expand, but a new token costs 2 * (576 + 512) instead of 2 * (192 + 128) a head and
cached token. Below 171 new tokens the absorbed form is cheaper: what is left of a prompt when its
prefix was cached or its chunks did not come out even. Each such token is a row of its own to the
decode kernel, with its request's block table and the length that it may see.
"""

from typing import Any

import numpy as np
import torch
from mla_kernels.indexer.rows import token_rows

from mla_backend import envs
from mla_backend.attention.kernel import DecodeKernel

MOST_TOKENS = 128
# Rows of a step that are not its decode requests'.
MOST_ROWS = 512
# Cached tokens per new one, from which expanding costs more than starting on a row of its own.
CONTEXT_PER_TOKEN = 4


def longest_extend(kernel: DecodeKernel, num_heads: int) -> int:
    """New tokens up to which a prompt's end attends in absorbed form; 0 = none does.

    By MLA_BACKEND_EXTEND_TOKENS. By itself not in batch-invariant mode, where the form must not
    depend on what else is in a step. With few heads a row leaves its tile of 64 partly empty, or
    on a CPU multiplies thin matrices, so fewer tokens pay.
    """
    asked: int | None = envs.get("MLA_BACKEND_EXTEND_TOKENS")
    if asked is not None:
        return asked
    if kernel.deterministic:
        return 0
    return min(MOST_TOKENS, 2 * num_heads)


def pays(query_lens: np.ndarray, contexts: np.ndarray, most_s_q: int, longest: int) -> bool:
    """Whether the leading requests of at most `longest` new tokens are better absorbed.

    query_lens, contexts  [B], new and cached tokens of vLLM's reordered batch
    most_s_q              new tokens of a decode request at most
    """
    longer = query_lens > longest
    leading = int(longer.argmax()) if longer.any() else len(query_lens)
    extends = query_lens[:leading] > most_s_q
    new, cached = query_lens[:leading][extends].sum(), contexts[:leading][extends].sum()
    return bool(0 < new <= MOST_ROWS and cached >= CONTEXT_PER_TOKEN * new)


def most_rows(max_requests: int, most_s_q: int) -> int:
    """Rows of a step at most: every request may be one of drafts that stands alone, and beside
    them there are the rows that `pays` lets in."""
    return max_requests * most_s_q + MOST_ROWS


def equal_run(query_lens: np.ndarray, most_s_q: int) -> int:
    """Leading requests that the kernel takes together, several tokens each; 0 if they have one
    token, as the rows that follow do."""
    s_q = query_lens[0]
    if not 1 < s_q <= most_s_q:
        return 0
    others = query_lens != s_q
    return int(others.argmax()) if others.any() else len(query_lens)


class ExtendRows:
    """Block tables and lengths of a step's tokens, in buffers made at start-up."""

    def __init__(self, max_rows: int, max_blocks: int, device: torch.device) -> None:
        self._request_ids = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self._lengths = torch.zeros_like(self._request_ids)
        self._tables = torch.zeros(max_rows, max_blocks, dtype=torch.int32, device=device)
        starts = torch.tensor([0, 1], dtype=torch.int32, device=device)
        # Compiles the kernel now, not in the first step.
        self.fill(starts, starts[:1], self._tables[1:2], 0, 1)

    def fill(
        self,
        query_start_loc: torch.Tensor,
        seq_lens: torch.Tensor,
        block_table: torch.Tensor,
        start: int,
        stop: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Of tokens `start` to `stop` - 1: block_table [rows, max_blocks] and seq_lens [rows].

        query_start_loc [B + 1], seq_lens [B] (the new tokens included) and block_table
        [B, max_blocks] are those of the requests, int32 on the device. No sync, no allocation.
        ValueError for more tokens than there is room for.
        """
        if stop > len(self._lengths):
            raise ValueError(f"Expected at most {len(self._lengths)} decode tokens, got {stop}")
        request_ids, lengths = self._request_ids[:stop], self._lengths[:stop]
        token_rows(query_start_loc, seq_lens, request_ids=request_ids, lengths=lengths)
        tables = self._tables[: stop - start, : block_table.shape[1]]
        torch.index_select(block_table, 0, request_ids[start:], out=tables)
        return tables, lengths[start:]


def host_lengths(common: Any) -> tuple[np.ndarray, np.ndarray]:
    """New and cached tokens [B] of a step, from the host's copies in vLLM's
    CommonAttentionMetadata. Drafts that were refused count as cached: an upper bound."""
    query_lens = np.diff(common.query_start_loc_cpu.numpy())
    return query_lens, common.seq_lens_cpu_upper_bound.numpy()[: len(query_lens)] - query_lens
