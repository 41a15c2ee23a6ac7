# SPDX-License-Identifier: Apache-2.0
"""Decode context parallelism: the ranks of a group share out the tokens of every request.

Token p lies on rank p // I % N, there at position p // (N * I) * I + p % I, for N ranks that take I
tokens in turn (vLLM's `cp_kv_cache_interleave_size`); so do its keys in the indexer's cache. The
indexer's queries and weights are the same on all ranks: each scores the tokens that it has, and the
best of all ranks' best are those that one rank with all tokens would choose.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from mla_kernels import exact_topk

# Candidates of all ranks that are merged at a time, and what one takes meanwhile: its position and
# score as gathered and in order, its place in that order as int64, and what torch adds.
MERGED_AT_ONCE = 2**22
CANDIDATE_BYTES = 40
# Stands for no token and sorts behind all of them.
_NONE = 2**31 - 1


@dataclass(frozen=True)
class Shard:
    """What rank `rank` of `size` holds.

    group   vLLM's, or anything with `all_gather(tensor, dim)`
    config  vLLM's ParallelConfig; its interleave is settled after the layers are built
    """

    rank: int
    size: int
    group: Any
    config: Any

    @classmethod
    def of(cls, vllm_config: Any) -> "Shard | None":
        """That of this process; None without decode context parallelism."""
        config = vllm_config.parallel_config
        if config.decode_context_parallel_size == 1:
            return None
        from vllm.distributed.parallel_state import get_dcp_group

        group = get_dcp_group()
        return cls(group.rank_in_group, group.world_size, group, config)

    @property
    def interleave(self) -> int:
        return int(self.config.cp_kv_cache_interleave_size)

    def local_lengths(self, lengths: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """out [n] int32 = how many of the first `lengths` [n] tokens this rank holds.

        In place where both are the same. On the device: vLLM's own lengths of the ranks are those
        of whole requests, and rows of one request must be told apart before they are shared out.
        """
        cycle = self.size * self.interleave
        begun = (lengths % cycle - self.rank * self.interleave).clamp_(0, self.interleave)
        return torch.add(lengths // cycle * self.interleave, begun, out=out)

    def to_global(self, local: torch.Tensor) -> torch.Tensor:
        """Positions within requests of this rank's positions; negative ones become _NONE."""
        I, N = self.interleave, self.size
        position = local // I * (N * I) + self.rank * I + local % I
        return position.masked_fill_(local < 0, _NONE)

    def owns(self, position: torch.Tensor) -> torch.Tensor:
        return position // self.interleave % self.size == self.rank

    def to_local(self, position: torch.Tensor) -> torch.Tensor:
        """This rank's positions of tokens that it owns."""
        I, N = self.interleave, self.size
        return position // (N * I) * I + position % I

    def merge(self, candidates: torch.Tensor, chosen: torch.Tensor, impl: str) -> None:
        """chosen [T, k] int32 = this rank's share of the k best of all ranks' candidates.

        candidates  [T, 2, k] int32: this rank's own positions (-1 = none) and the bits of their
                    fp32 scores (-inf = none); overwritten

        Local positions, ascending and at the front of a row, -1 behind them. The choice is that of
        `exact_topk` over all tokens: of equal scores the lowest positions. Every rank calls with
        the same T and k, as the collectives of a group must match.
        """
        T, k = chosen.shape
        for rows in _chunks(T, self.size * k):
            self._merge(candidates[rows], chosen[rows], impl)

    def _merge(self, own: torch.Tensor, chosen: torch.Tensor, impl: str) -> None:
        R, _, k = own.shape
        own[:, 0] = self.to_global(own[:, 0])
        # One collective for both; integers, so that no bits of a score can change on the way.
        gathered = self.group.all_gather(own.view(R, 2 * k), dim=0).view(self.size, R, 2, k)
        position, order = gathered[:, :, 0].transpose(0, 1).reshape(R, -1).sort(dim=1)
        scores = gathered[:, :, 1].transpose(0, 1).reshape(R, -1).view(torch.float32)
        # In the order of positions ties to the lowest column are ties to the lowest position.
        best = exact_topk(scores.gather(1, order), k, impl=impl)
        position = position.gather(1, best.clamp(min=0).long())
        mine = self.owns(position) & (best >= 0)
        # Those of this rank move to the front, in order; the others go to a spare column.
        column = torch.where(mine, mine.cumsum(1) - 1, k)
        found = torch.full((R, k + 1), -1, dtype=torch.int32, device=own.device)
        chosen.copy_(found.scatter_(1, column, self.to_local(position))[:, :k])


def _chunks(T: int, candidates: int) -> Iterator[slice]:
    """Rows that are merged together, of so many candidates each: the same on every rank."""
    step = max(MERGED_AT_ONCE // candidates, 1)
    for first in range(0, T, step):
        yield slice(first, min(first + step, T))
