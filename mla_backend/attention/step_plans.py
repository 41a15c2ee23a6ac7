# SPDX-License-Identifier: Apache-2.0
"""The decode plans of an engine: buffers for its largest batch, viewed by the steps."""

import torch
from mla_kernels import MlaDecodePlan

from mla_backend.attention.kernel import DecodeKernel


class StepPlans:
    """One plan at a time, for steps of at most `max_requests` requests.

    The buffers stay where they are, so a CUDA graph captured with a plan of some shape replays with
    whatever `for_step` last wrote for that shape.
    """

    def __init__(
        self,
        kernel: DecodeKernel,
        num_heads: int,
        max_requests: int,
        max_seq_len: int,
        device: torch.device,
    ) -> None:
        """num_heads: of q as the kernel sees it, so the gathered ones under DCP."""
        self._kernel = kernel
        self._num_heads = num_heads
        self._max_requests = max_requests
        self._max_seq_len = max_seq_len
        self._device = device
        self._largest: dict[int, MlaDecodePlan] = {}  # by s_q
        self._plans: dict[tuple[int, int], MlaDecodePlan] = {}  # by (requests, s_q)

    def reserve(self, s_q: int) -> MlaDecodePlan:
        """The plan that owns the buffers for s_q new tokens a request; made if there is none."""
        if s_q not in self._largest:
            seq_lens = torch.zeros(self._max_requests, dtype=torch.int32, device=self._device)
            self._largest[s_q] = self._kernel.plan(
                seq_lens, self._num_heads, s_q, self._max_seq_len
            )
        return self._largest[s_q]

    @property
    def workspace_bytes(self) -> int:
        """Device memory that the plans reserved so far hold."""
        return sum(plan.workspace_bytes for plan in self._largest.values())

    def for_step(self, seq_lens: torch.Tensor, s_q: int) -> MlaDecodePlan:
        """The plan for seq_lens [B] int32, without a sync. The one before is no longer valid."""
        shape = (seq_lens.shape[0], s_q)
        if shape not in self._plans:
            self._plans[shape] = self.reserve(s_q).narrow(seq_lens.shape[0])
        self._plans[shape].update(seq_lens)
        return self._plans[shape]
