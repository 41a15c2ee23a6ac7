# SPDX-License-Identifier: Apache-2.0
"""One call of `mla_decode`, as its kernels' launchers get it."""

from dataclasses import dataclass
from typing import Any

import torch

from mla_kernels.decode.plan.launcher import DevicePlan
from mla_kernels.decode.query import Query, first_part


@dataclass(frozen=True)
class DecodeCall:
    """`mla_decode`'s arguments, checked: out and lse are contiguous, the plan is on the device."""

    q: Query
    kv_cache: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    plan: DevicePlan
    out: torch.Tensor
    lse: torch.Tensor
    scale: float
    kv_scale: float | torch.Tensor | None = None
    q_scale: float | torch.Tensor | None = None
    causal: bool = True
    rescale: str = "pow2"

    @property
    def rows(self) -> int:
        """Query rows of a request: s_q * H."""
        _, s_q, H, _ = first_part(self.q).shape
        return s_q * H

    def tables(self) -> tuple[torch.Tensor, ...]:
        """What says which tiles a program reads."""
        return self.block_table, self.seq_lens, self.plan.parts, self.plan.requests

    def results(self) -> tuple[torch.Tensor, ...]:
        """Where a request's results go, and those of its splits."""
        return self.out, self.lse, self.plan.acc, self.plan.sums

    def sizes(self) -> tuple[int, int, int, int]:
        """Stride of the block table, rows, H and s_q."""
        _, s_q, H, _ = first_part(self.q).shape
        return self.block_table.stride(0), s_q * H, H, s_q

    def modes(self) -> dict[str, Any]:
        """Compile-time arguments that the call decides."""
        _, s_q, _, _ = first_part(self.q).shape
        return {"CAUSAL": self.causal and s_q > 1, "CHUNKED": self.plan.chunk > 0}
