# SPDX-License-Identifier: Apache-2.0
"""The decode plans of an engine: buffers for its largest batch, viewed by the steps."""

import torch
from mla_kernels import MlaDecodePlan

from mla_backend.attention.kernel import DecodeKernel


class StepPlans:
    """Plans for steps of at most `max_requests` requests, one at a time of each s_q.

    The buffers stay where they are, so a CUDA graph captured with a plan of some shape replays with
    whatever `for_step` last wrote for that shape, or with what it writes itself.
    """

    def __init__(
        self,
        kernel: DecodeKernel,
        num_heads: int,
        max_requests: int,
        max_seq_len: int,
        device: torch.device,
        max_rows: int = 0,
    ) -> None:
        """num_heads: of q as the kernel sees it, so the gathered ones under DCP. max_rows: of one
        new token each, where prompts' ends are cut into requests of few tokens (extends.py)."""
        self._kernel = kernel
        self._num_heads = num_heads
        self._max_requests = max_requests
        self._max_rows = max_rows
        self._max_seq_len = max_seq_len
        self._device = device
        self._largest: dict[int, MlaDecodePlan] = {}  # by s_q
        self._plans: dict[tuple[int, int], MlaDecodePlan] = {}  # by (requests, s_q)

    def reserve(self, max_s_q: int) -> None:
        """Make the plans for 1 to max_s_q new tokens a request: of requests that are drafted for,
        some steps have fewer. They share the memory of the largest: one launch at a time uses it.
        """
        for s_q in range(max_s_q, 0, -1):
            self._reserved(s_q)

    def most_requests(self, s_q: int) -> int:
        """Requests of s_q new tokens in a step, at most."""
        return max(self._max_requests, self._max_rows // s_q)

    def _reserved(self, s_q: int) -> MlaDecodePlan:
        if s_q not in self._largest:
            most = self.most_requests(s_q)
            seq_lens = torch.zeros(most, dtype=torch.int32, device=self._device)
            lender = self._largest[max(self._largest)] if self._largest else None
            self._largest[s_q] = self._kernel.plan(
                seq_lens, self._num_heads, s_q, self._max_seq_len, lender
            )
        return self._largest[s_q]

    @property
    def workspace_bytes(self) -> int:
        """Device memory that the plans reserved so far hold together."""
        held: dict[int, int] = {}
        for s_q in sorted(self._largest):  # the largest last: it lends what it has
            held |= self._largest[s_q].workspace
        return sum(held.values())

    def for_step(self, seq_lens: torch.Tensor, s_q: int) -> MlaDecodePlan:
        """The plan for seq_lens [B] int32, without a sync. The one before of that s_q is no longer
        valid; plans of two s_q share the memory of partial results, for launches one after the
        other."""
        shape = (seq_lens.shape[0], s_q)
        if shape not in self._plans:
            self._plans[shape] = self._reserved(s_q).narrow(seq_lens.shape[0])
        self._plans[shape].update(seq_lens)
        return self._plans[shape]
