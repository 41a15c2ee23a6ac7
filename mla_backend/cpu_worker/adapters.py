# SPDX-License-Identifier: Apache-2.0
"""Requests without a LoRA adapter in a step of others with one.

Their slot is -1, by which vLLM's CPU operators index up to 0.32: they are given the adapter of the
last slot.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from vllm.lora.ops.torch_ops import lora_ops
from vllm.lora.punica_wrapper import punica_cpu

_EXPAND = ("bgmv_expand", "bgmv_expand_slice")  # of a prompt too: vLLM's sgmv_* call these


def _of_adapted_rows(expand: Callable[..., None]) -> Callable[..., None]:
    """vLLM's `expand`, adding nothing to rows whose slot is -1.

    inputs [T, rank]; weights [slots, 1, width, rank]; output [T, width]; slots [T] int64
    """

    @functools.wraps(expand)
    def expand_adapted(
        inputs: torch.Tensor,
        weights: torch.Tensor,
        output: torch.Tensor,
        slots: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        inputs = inputs.masked_fill((slots < 0)[:, None], 0.0)
        expand(inputs, weights, output, slots, *args, **kwargs)

    expand_adapted.adapted = True  # type: ignore[attr-defined]
    return expand_adapted


def leave_others_alone() -> None:
    """Put the mend in the place of vLLM's operators; safe to call again."""
    for name in _EXPAND:
        stock = getattr(lora_ops, name)
        if not hasattr(stock, "adapted"):
            mended = _of_adapted_rows(stock)
            setattr(lora_ops, name, mended)
            setattr(punica_cpu, name, mended)
