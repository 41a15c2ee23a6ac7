# SPDX-License-Identifier: Apache-2.0
"""Collectives of vLLM's groups of ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def all_gather_into(gathered: torch.Tensor, own: torch.Tensor) -> None:
    """gathered [ranks * n] = `own` [n] of every rank of the group for decode context parallelism,
    one after the other, on the current stream.

    vLLM's `all_gather` makes new memory for each result, in a CUDA graph a part of the graph's
    that other tensors had before and have later. With the communicator that its other collectives
    of this group use, so that all of them are in one order.
    """
    import torch
    from vllm.distributed.parallel_state import get_dcp_group

    group = get_dcp_group()
    communicator = getattr(group.device_communicator, "pynccl_comm", None)
    if communicator is None or communicator.disabled:
        torch.distributed.all_gather_into_tensor(gathered, own, group=group.device_group)
    else:
        communicator.all_gather(gathered, own)
