# SPDX-License-Identifier: Apache-2.0
"""Which request each token of a step belongs to, and how many tokens of it that token sees.

A decode token, a prefill token and a token of a draft are all one row: the sparse kernels do not
tell them apart.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch


@dataclass
class TokenRows:
    """T tokens of B requests, as the indexer and `positions_to_slots` take them.

    block_table  [B, max_blocks] int32      seq_lens  [B] int32, the new tokens included
    request_ids  [T] int32, -1 = padding; None: T / B rows a request, in order
    lengths      [T] int32: the row sees the first `lengths` tokens of its request
    """

    block_table: torch.Tensor
    seq_lens: torch.Tensor
    request_ids: torch.Tensor | None
    lengths: torch.Tensor


class RowsBuilder:
    """Builds `TokenRows` into buffers that stay where they are, as a captured graph needs."""

    def __init__(self, max_tokens: int, device: torch.device) -> None:
        self._tokens = torch.empty(max_tokens, dtype=torch.int32, device=device)
        self._request_ids = torch.empty_like(self._tokens)
        self._lengths = torch.empty_like(self._tokens)

    def build(self, common: Any) -> TokenRows:
        """For vLLM's CommonAttentionMetadata. Reads only its host copies back."""
        B, T = common.num_reqs, common.num_actual_tokens
        if T > len(self._tokens):
            raise ValueError(f"Expected at most {len(self._tokens)} tokens in a step, got {T}")
        seq_lens, ends = common.seq_lens[:B], common.query_start_loc[1 : B + 1]
        tokens, request_ids, lengths = (
            x[:T] for x in (self._tokens, self._request_ids, self._lengths)
        )
        torch.arange(T, out=tokens)  # again in each step: sleep mode discards what is kept here
        torch.searchsorted(ends, tokens, right=True, out_int32=True, out=request_ids)
        padding = request_ids >= B
        request = request_ids.clamp(max=B - 1)
        # The last new token of a request sees all of it, the one before it one token less.
        torch.sub(seq_lens[request] + tokens + 1, ends[request], out=lengths)
        lengths.masked_fill_(padding, 0).clamp_(min=0)
        request_ids.masked_fill_(padding, -1)
        return TokenRows(
            common.block_table_tensor[:B],
            seq_lens,
            None if _in_equal_runs(common) else request_ids,
            lengths,
        )


def max_tokens(vllm_config: Any) -> int:
    """Most tokens that a step can have."""
    scheduler, speculative = vllm_config.scheduler_config, vllm_config.speculative_config
    drafts = speculative.num_speculative_tokens if speculative is not None else 0
    return int(max(scheduler.max_num_batched_tokens, scheduler.max_num_seqs * (1 + drafts)))


def _in_equal_runs(common: Any) -> bool:
    """Whether token t belongs to request t // (T / B), padding at the end aside.

    So it is in a decode step. The kernels then read the keys of a request once for all its rows.
    """
    B, run = common.num_reqs, common.max_query_len
    if B * run != common.num_actual_tokens:
        return False
    starts = common.query_start_loc_cpu[: B + 1].numpy()
    return bool((starts == np.minimum(np.arange(B + 1) * run, starts[-1])).all())
