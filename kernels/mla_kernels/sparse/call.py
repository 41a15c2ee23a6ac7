# SPDX-License-Identifier: Apache-2.0
"""One call of `mla_sparse_attention`, as its kernels' launchers get it."""

from dataclasses import dataclass, replace
from typing import Any

import torch

from mla_kernels.decode.query import Query, tokens_of
from mla_kernels.sparse.triton.tiles import (
    FIXED_WORKSPACE,
    Split,
    Turn,
    partial_bytes,
    tokens_at_once,
)


@dataclass(frozen=True)
class SparseCall:
    """`mla_sparse_attention`'s arguments, checked: out and lse are contiguous."""

    q: Query
    kv_cache: torch.Tensor
    slots: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    scale: float
    kv_scale: float | torch.Tensor | None = None
    lengths: torch.Tensor | None = None
    sink: torch.Tensor | None = None
    max_logits: torch.Tensor | None = None
    workspace: torch.Tensor | None = None

    @property
    def shape(self) -> tuple[int, int, int]:
        """Tokens, heads and slots a token."""
        T, H = self.lse.shape
        return T, H, self.slots.shape[1]

    def inputs(self) -> tuple[torch.Tensor, ...]:
        """Slots, lengths and sink; what stands for a missing one is not read."""
        lengths = self.slots if self.lengths is None else self.lengths
        return self.slots, lengths, self.lse if self.sink is None else self.sink

    def modes(self, split: Split) -> dict[str, Any]:
        """Compile-time arguments that the call decides."""
        return {
            "HAS_LENGTHS": self.lengths is not None,
            "HAS_SINK": self.sink is not None,
            "SPLIT": split.splits > 1,
        }

    def partials(self, split: Split) -> tuple[torch.Tensor, torch.Tensor]:
        """O and its sums of each range of slots, in the workspace; ValueError if it is too small.
        Without ranges nothing is read or written there."""
        if split.splits == 1:
            return self.lse, self.lse
        T, H, _ = self.shape
        DV = self.out.shape[2]
        needed = partial_bytes(T, H, split.splits, DV)
        workspace = self.workspace
        if workspace is None:
            workspace = torch.empty(needed, dtype=torch.uint8, device=self.lse.device)
        if workspace.numel() < needed:
            raise ValueError(f"Expected workspace of {needed} bytes, got {workspace.numel()}")
        floats = workspace[:needed].view(torch.float32)
        acc, sums = floats.split([T * split.splits * H * n for n in (DV, 2)])
        return acc, sums

    def largest(self, split: Split) -> torch.Tensor:
        """Where the largest logits go, filled with -inf where ranges of slots meet there (by torch,
        so that such a call is not replayed); what stands for missing ones is not written."""
        if self.max_logits is None:
            return self.lse
        return self.max_logits.fill_(-torch.inf) if split.splits > 1 else self.max_logits

    def turns(self, split: Split) -> "list[SparseCall]":
        """The call as several, one after the other, whose partial results fit the workspace; of a
        token at a time where they fit for none."""
        T, H, _ = self.shape
        if split.splits == 1:
            return [self]
        room = FIXED_WORKSPACE if self.workspace is None else self.workspace.numel()
        turn = max(1, tokens_at_once(H, split.splits, self.out.shape[2], room))
        if turn >= T:
            return [self]
        whole = self
        if self.workspace is None:  # one for all turns: a replay allocates what all of them do
            needed = partial_bytes(turn, H, split.splits, self.out.shape[2])
            scratch = torch.empty(needed, dtype=torch.uint8, device=self.lse.device)
            whole = replace(self, workspace=scratch)
        return [whole._part(slice(t, t + turn)) for t in range(0, T, turn)]

    def parts(self, turns: tuple[Turn, ...]) -> "list[tuple[SparseCall, Split]]":
        """The call as so many launches."""
        if len(turns) == 1:
            return [(self, turns[0].split)]
        return [(self._part(slice(turn.start, turn.stop)), turn.split) for turn in turns]

    def _part(self, tokens: slice) -> "SparseCall":
        return replace(
            self,
            q=tokens_of(self.q, tokens),
            slots=self.slots[tokens],
            out=self.out[tokens],
            lse=self.lse[tokens],
            lengths=None if self.lengths is None else self.lengths[tokens],
            max_logits=None if self.max_logits is None else self.max_logits[tokens],
        )
