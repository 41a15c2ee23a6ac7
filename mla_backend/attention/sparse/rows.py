# SPDX-License-Identifier: Apache-2.0
"""Which request each token of a step belongs to, and how many tokens of it that token sees.

A decode token, a prefill token and a token of a draft are all one row: the sparse kernels do not
tell them apart.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from mla_kernels.indexer.rows import token_rows

from mla_backend.attention.builder import drafts_of
from mla_backend.attention.shard import Shard, Shares


@dataclass
class TokenRows:
    """T tokens of B requests, as the indexer and `positions_to_slots` take them.

    block_table  [B, max_blocks] int32      seq_lens  [B] int32, the new tokens included
    request_ids  [T] int32, -1 = padding; None: T / B rows a request, in order
    lengths      [T] int32: the row sees the first `lengths` tokens of its request
    starts       [B + 1] int32, vLLM's `query_start_loc`; None of some rows of a step

    Under decode context parallelism the table and both lengths are those of this rank's tokens.
    """

    block_table: torch.Tensor
    seq_lens: torch.Tensor
    request_ids: torch.Tensor | None
    lengths: torch.Tensor
    starts: torch.Tensor | None = None

    def first(self, requests: int, tokens: int) -> "TokenRows":
        """Those of the leading requests, which have `tokens` tokens."""
        return TokenRows(
            self.block_table[:requests],
            self.seq_lens[:requests],
            None if self.request_ids is None else self.request_ids[:tokens],
            self.lengths[:tokens],
        )

    def some(self, tokens: slice) -> "TokenRows":
        """Some of the tokens, with `request_ids`, of the same requests."""
        assert self.request_ids is not None
        ids, lengths = self.request_ids[tokens], self.lengths[tokens]
        return TokenRows(self.block_table, self.seq_lens, ids, lengths)


class RowsBuilder:
    """Builds `TokenRows` into buffers that stay where they are, as a captured graph needs."""

    def __init__(self, max_tokens: int, device: torch.device, shard: Shard | None = None) -> None:
        self._request_ids = torch.full((max_tokens,), -1, dtype=torch.int32, device=device)
        self._lengths = torch.zeros_like(self._request_ids)
        self._shard = shard
        if shard is not None:
            self._scratch = torch.zeros_like(self._lengths)
            self._shares = Shares(shard, max_tokens, device)
        nothing = torch.zeros(2, dtype=torch.int32, device=device)
        self._fill(nothing, nothing[:1], 1)  # compiles the kernel now, not in the first step

    def _fill(
        self, starts: torch.Tensor, seq_lens: torch.Tensor, T: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        request_ids, lengths = self._request_ids[:T], self._lengths[:T]
        token_rows(starts, seq_lens, request_ids=request_ids, lengths=lengths)
        return request_ids, lengths

    def build(self, common: Any) -> TokenRows:
        """For vLLM's CommonAttentionMetadata. Reads only its host copies back."""
        B, T = common.num_reqs, common.num_actual_tokens
        if T > len(self._lengths):
            raise ValueError(f"Expected at most {len(self._lengths)} tokens in a step, got {T}")
        seq_lens, starts = common.seq_lens[:B], common.query_start_loc[: B + 1]
        request_ids, lengths = self._fill(starts, seq_lens, T)
        if self._shard is not None:
            self._shard.lengths(lengths, out=lengths, spare=self._scratch[:T])
            # Which no kernel reads that is given `lengths`; dummy steps of vLLM's second model
            # runner before 0.30 come without.
            local = common.dcp_local_seq_lens
            seq_lens = self._shares.of(seq_lens) if local is None else local[:B]
        return TokenRows(
            common.block_table_tensor[:B],
            seq_lens,
            None if _in_equal_runs(common) else request_ids,
            lengths,
            starts,
        )

    def refill(self, rows: TokenRows) -> None:
        """`rows` that `build` made, in the same buffers, for lengths that have been advanced in
        place; may be captured in a CUDA graph. Not under decode context parallelism."""
        assert self._shard is None and rows.starts is not None
        self._fill(rows.starts, rows.seq_lens, len(rows.lengths))


def max_tokens(vllm_config: Any) -> int:
    """Most tokens that a step can have."""
    scheduler, longest = vllm_config.scheduler_config, 1 + drafts_of(vllm_config)
    return int(max(scheduler.max_num_batched_tokens, scheduler.max_num_seqs * longest))


def _in_equal_runs(common: Any) -> bool:
    """Whether token t belongs to request t // (T / B), padding at the end aside.

    So it is in a decode step. The kernels then read the keys of a request once for all its rows.
    """
    B, run = common.num_reqs, common.max_query_len
    if B * run != common.num_actual_tokens:
        return False
    starts = common.query_start_loc_cpu[: B + 1].numpy()
    return bool((starts == np.minimum(np.arange(B + 1) * run, starts[-1])).all())
