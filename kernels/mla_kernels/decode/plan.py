# SPDX-License-Identifier: Apache-2.0
"""The plan of a decode step: how the cache of a batch is shared out over the device."""

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class MlaDecodePlan:
    """What one step's layers share. `device_plan` is None where no kernel needs one (CPU)."""

    num_requests: int
    s_q: int
    num_heads: int
    deterministic: bool
    device_plan: Any = None

    def check_fits(self, num_requests: int, s_q: int, num_heads: int) -> None:
        """ValueError if the plan was made for a batch of another shape."""
        made_for = (self.num_requests, self.s_q, self.num_heads)
        if made_for != (num_requests, s_q, num_heads):
            raise ValueError(
                f"Expected a plan for (requests, s_q, heads) = {(num_requests, s_q, num_heads)}, "
                f"got one for {made_for}"
            )


def plan_mla_decode(
    seq_lens: torch.Tensor,
    *,
    num_heads: int,
    s_q: int,
    kv_lora_rank: int = 512,
    block_size: int = 64,
    deterministic: bool = False,
) -> MlaDecodePlan:
    """Plan the decode of a batch from seq_lens [B] int32, on its device, without a host sync.

    Build it once a step and pass it to every layer's `mla_decode(plan=...)`.
    """
    device_plan = None
    if seq_lens.is_cuda:
        # Seam for the Triton implementation: decode/triton/plan.py
        from mla_kernels.decode.triton.plan import build_plan  # type: ignore[attr-defined]

        device_plan = build_plan(
            seq_lens,
            num_heads=num_heads,
            s_q=s_q,
            kv_lora_rank=kv_lora_rank,
            block_size=block_size,
            deterministic=deterministic,
        )
    return MlaDecodePlan(seq_lens.shape[0], s_q, num_heads, deterministic, device_plan)
