# SPDX-License-Identifier: Apache-2.0
"""Decode context parallelism: the ranks of a group choose together what one rank would alone.

The indexer's queries and weights are the same on all ranks, its keys are shared out with the KV
cache. Each rank takes the best of its own tokens, the ranks exchange these with their scores, and
each keeps those of the best of all that are its own (`mla_kernels.merge_topk`).

Everything here is on vLLM's current stream, in memory that was made with the layers and that
nothing else writes, whatever tensors a CUDA graph puts into the rest of its memory. Between two
exchanges of a rank there is its merge, which reads the first before the second begins.
"""

from collections.abc import Iterator

import torch
from mla_kernels import merge_topk
from mla_kernels.topk.plan import MAX_MERGED, next_power_of_2

from mla_backend import compat
from mla_backend.attention.shard import Shard
from mla_backend.refusals import RefusalError

# Candidates of all ranks that are exchanged at a time, of 8 bytes each.
MOST_CANDIDATES = 2**22


class SharedChoice:
    """The exchange of one engine, for all layers and steps.

    ranks   of the group      topk    tokens that are chosen for a row
    tokens  most rows of a step

    Metadata builders say what this rank has (`shard`), the last of them for good: a KV connector
    may settle it behind the first ones (vLLM 0.29 to 0.32).
    """

    def __init__(self, ranks: int, topk: int, tokens: int, device: torch.device) -> None:
        if ranks * next_power_of_2(topk) > MAX_MERGED:
            most = MAX_MERGED // next_power_of_2(topk)
            raise RefusalError(
                f"decode_context_parallel_size {ranks} with index_topk {topk}; the kernel that "
                f"merges the choices of ranks takes {most} of them. "
                f"Mend: --decode-context-parallel-size {most}"
            )
        self.shard: Shard | None = None
        self._rows = max(1, min(tokens, MOST_CANDIDATES // (ranks * topk)))
        rows, row = self._rows, 2 * topk
        self._own = torch.empty(rows * row, dtype=torch.int32, device=device)
        self._gathered = torch.empty(ranks * rows * row, dtype=torch.int32, device=device)
        self._ranks, self._topk = ranks, topk

    def turns(self, T: int) -> Iterator[slice]:
        """Rows that are exchanged together: the same on every rank, as collectives must match."""
        for first in range(0, T, self._rows):
            yield slice(first, min(first + self._rows, T))

    def candidates(self, T: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Where this rank's candidates of a turn of T rows go: positions among its own tokens
        [T, topk] int32, -1 for none, and their scores [T, topk] fp32."""
        own = self._own[: T * 2 * self._topk].view(T, 2, self._topk)
        return own[:, 0], own[:, 1].view(torch.float32)

    def keep_best(self, chosen: torch.Tensor, impl: str) -> None:
        """chosen [T, topk] int32 = those of the candidates of this turn that are among the best of
        all ranks, in their order, then -1. Every rank calls it with the same T."""
        assert self.shard is not None
        T = chosen.shape[0]
        numbers = T * 2 * self._topk
        gathered = self._gathered[: self._ranks * numbers]
        compat.all_gather_into(gathered, self._own[:numbers])
        merge_topk(
            gathered.view(self._ranks, T, 2, self._topk),
            self.shard.rank,
            interleave=self.shard.interleave,
            out=chosen,
            impl=impl,
        )
