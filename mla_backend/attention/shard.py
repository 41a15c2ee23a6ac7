# SPDX-License-Identifier: Apache-2.0
"""Which tokens of a request a rank of decode context parallelism has, and where."""

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Shard:
    """The tokens of rank `rank` of the `size` that share each request's cache: runs of `interleave`
    tokens (vLLM's cp_kv_cache_interleave_size) are dealt to the ranks in turn."""

    size: int = 1
    rank: int = 0
    interleave: int = 1

    @classmethod
    def of(cls, vllm_config: Any) -> "Shard | None":
        """That of this process; None without decode context parallelism. vLLM settles the
        interleave between the layers and the metadata builders: not to be asked for earlier."""
        parallel = vllm_config.parallel_config
        if parallel.decode_context_parallel_size == 1:
            return None
        from vllm.distributed.parallel_state import get_dcp_group

        group = get_dcp_group()
        return cls(group.world_size, group.rank_in_group, int(parallel.cp_kv_cache_interleave_size))

    def lengths(
        self, total: torch.Tensor, *, out: torch.Tensor, spare: torch.Tensor
    ) -> torch.Tensor:
        """How many of the first `total` tokens of a request this rank has; returns `out`.

        total, out and spare [n] of one integer dtype on one device; out may be total, spare is
        overwritten. No sync, no allocation.
        """
        dealt = self.size * self.interleave  # in a round
        torch.remainder(total, dealt, out=spare)
        spare.sub_(self.rank * self.interleave).clamp_(0, self.interleave)
        torch.div(total, dealt, rounding_mode="floor", out=out)
        return out.mul_(self.interleave).add_(spare)

    def slots(
        self,
        positions: torch.Tensor,
        block_table: torch.Tensor,
        requests: torch.Tensor,
        block_size: int,
    ) -> torch.Tensor:
        """Slots [n] int64 (block * block_size + offset) of this rank's cache where tokens lie; -1
        for another rank's.

        positions [n] int64 of tokens of the requests in rows `requests` [n] of block_table
        [B, max_blocks]. No sync.
        """
        spare = torch.empty_like(positions)
        before = self.lengths(positions, out=torch.empty_like(positions), spare=spare)
        through = self.lengths(positions + 1, out=torch.empty_like(positions), spare=spare)
        # Entries behind a request's last block hold anything, and there may be no more columns.
        column = (before // block_size).clamp(max=block_table.shape[1] - 1)
        slots = block_table[requests, column].long() * block_size + before % block_size
        return slots.masked_fill_(through == before, -1)


class Shares:
    """A rank's part of up to `most` lengths at a time, int32, in a buffer that stays in place."""

    def __init__(self, shard: Shard, most: int, device: torch.device) -> None:
        self._shard = shard
        self._shares, self._spare = torch.zeros(2, most, dtype=torch.int32, device=device)

    def of(self, total: torch.Tensor) -> torch.Tensor:
        """See `Shard.lengths`; overwritten by the next call."""
        n = len(total)
        return self._shard.lengths(total, out=self._shares[:n], spare=self._spare[:n])
