# SPDX-License-Identifier: Apache-2.0
"""Modes of torch in which a caller may be, and which must not change what an op computes."""

import functools
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def without_modes(
    function: Callable[Concatenate[torch.Tensor, P], R],
) -> Callable[Concatenate[torch.Tensor, P], R]:
    """`function`, which computes in torch on the device of its first argument, without gradients
    and without autocast.

    Autocast would round the factors of products in fp32 to 16 bits; kernels, which it does not
    reach, would give other numbers than torch.
    """

    @functools.wraps(function)
    def run(x: torch.Tensor, /, *args: P.args, **kwargs: P.kwargs) -> R:
        device = x.device.type
        with torch.no_grad():
            if device == "meta" or not torch.is_autocast_enabled(device):  # meta has no autocast
                return function(x, *args, **kwargs)
            with torch.autocast(device, enabled=False):
                return function(x, *args, **kwargs)

    return run
