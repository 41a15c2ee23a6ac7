# SPDX-License-Identifier: Apache-2.0
"""Modes of torch in which a caller may be, and which must not change what an op computes."""

import functools
import threading
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")

# Where a device's products of fp32 have their precision: torch raises where the old and the new
# names of that setting disagree, but for these. Before 2.9 there is none.
_MATMUL: dict[str, Any] = {
    "cpu": getattr(torch.backends.mkldnn, "matmul", None),
    "cuda": torch.backends.cuda.matmul,
}
_LOCK = threading.Lock()
# By device: how many ops have its products in fp32 now, and what the caller had set.
_IN_FP32: dict[str, tuple[int, str]] = {}


def without_modes(
    function: Callable[Concatenate[torch.Tensor, P], R],
) -> Callable[Concatenate[torch.Tensor, P], R]:
    """`function`, which computes in torch on the device of its first argument, without gradients,
    of either mode, without autocast and with products of fp32 in fp32.

    Autocast would round the factors of products in fp32 to 16 bits, and refuses to join tensors of
    another 16-bit float than its own; `torch.set_float32_matmul_precision` or `torch.backends`
    would round those factors to TF32 or bf16. Kernels, which none of these reaches, would give
    other numbers than torch. That precision is the process's: while the function runs, products of
    other threads are in fp32 too. To whoever leaves it at fp32 nothing is set.
    """

    @functools.wraps(function)
    def run(x: torch.Tensor, /, *args: P.args, **kwargs: P.kwargs) -> R:
        device = x.device.type
        set_here = _products_in_fp32(device)
        try:
            with torch.no_grad(), torch.autograd.forward_ad._set_fwd_grad_enabled(False):
                if device == "meta" or not torch.is_autocast_enabled(device):  # meta has none
                    return function(x, *args, **kwargs)
                with torch.autocast(device, enabled=False):
                    return function(x, *args, **kwargs)
        finally:
            if set_here:
                _products_as_before(device)

    return run


def untraced(function: Callable[P, R]) -> Callable[P, R]:
    """`function`, an op, at which a caller that `torch.compile` compiles stops, to go on behind it.

    Traced, memory that is used again (torch_scratch.py) and what a launch remembers (launch.py,
    record.py) would be constants of the compiled caller.
    """
    disabled: list[Callable[P, R]] = []  # one, made when needed: it imports all of torch.compile

    @functools.wraps(function)
    def op(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_dynamo_compiling():
            if not disabled:
                disabled.append(torch.compiler.disable(function))
            return disabled[0](*args, **kwargs)
        return function(*args, **kwargs)

    return op


def _products_in_fp32(device: str) -> bool:
    """Set that, where it is not so; whether `_products_as_before` is due."""
    matmul: Any = _MATMUL.get(device)
    with _LOCK:
        count, before = _IN_FP32.get(device, (0, getattr(matmul, "fp32_precision", "none")))
        if before in ("ieee", "none"):
            return False
        if not count:
            matmul.fp32_precision = "ieee"
        _IN_FP32[device] = count + 1, before
        return True


def _products_as_before(device: str) -> None:
    """Put the caller's setting back, unless an op in another thread still needs fp32."""
    matmul = _MATMUL[device]
    with _LOCK:
        count, before = _IN_FP32.pop(device)
        if count > 1:
            _IN_FP32[device] = count - 1, before
            return
        matmul.fp32_precision = "none"  # what holds for all products, if that is where it was from
        if matmul.fp32_precision != before:
            matmul.fp32_precision = before
