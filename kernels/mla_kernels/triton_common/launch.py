# SPDX-License-Identifier: Apache-2.0
"""Launching a kernel without Triton's work per call.

`kernel[grid](...)` binds and specialises every argument, looks the compiled kernel up by all of
that and compares every global that the kernel reads with its value at compile time: 30 to 100 us of
the host for kernels of 20 arguments and 40 globals. A step outside a CUDA graph (a chunk of a
prompt) launches several in each layer, and short ones then wait for the host. A compiled kernel
called by itself takes a few microseconds.
"""

from collections.abc import Callable
from typing import Any

import torch
from triton.runtime.jit import JITFunction

from mla_kernels.triton_common.record import recording

# What Triton compiled, by kernel and kind of arguments, with the values of the parameters behind
# the positional ones.
_READY: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}
# Kernels and descriptor layouts whose id() is in a key, so that they stay alive.
_ALIVE: dict[int, Any] = {}
_PAST_INT32 = 2**31
# Of every kernel, as they are tested: Triton's own default is an environment variable's
# (TRITON_DEFAULT_FP_FUSION), and 3.9 announces that it will change.
COMMON_OPTIONS = {"enable_fp_fusion": True}
# Options that AMD's compiler does not know; both ask for speed alone.
NVIDIA_OPTIONS = frozenset({"maxnreg", "launch_pdl"})


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **named: Any) -> None:
    """`kernel[grid](*args, **named)`, remembering what Triton compiled.

    args   run-time arguments, in the kernel's order: tensors, TMA descriptors, numbers
    named  compile-time constants, which are remembered by value, and Triton's options (num_warps,
           launch_pdl)

    Argument lists are told apart at least as finely as Triton's specialisation does; the first of a
    kind goes through Triton. A recording that is going on (record.py) takes note. As torch does it,
    the launch is on the GPU of the arguments and its current stream.
    """
    with torch._C.DisableTorchFunction():
        gpu = _gpu_of(args)
    if gpu is not None and gpu != torch.cuda.current_device():
        with torch.cuda.device(gpu):
            launch(kernel, grid, *args, **named)
        return
    record = recording()
    if not isinstance(kernel, JITFunction) or torch.version.hip is not None:
        # The interpreter, or AMD, where Triton looks at more of a tensor.
        named = {k: v for k, v in named.items() if k not in NVIDIA_OPTIONS}
        kernel[grid](*args, **COMMON_OPTIONS, **named)
        if record is not None:
            record.spoil()
        return
    if record is None:
        _launch(kernel, grid, args, named)
        return
    with torch._C.DisableTorchFunction():
        compiled, rest, device = _launch(kernel, grid, args, named)
        record.note(compiled, grid, (*args, *rest), device)


def _gpu_of(args: tuple[Any, ...]) -> int | None:
    """The GPU of the first argument that lies on one; None without such."""
    for x in args:
        tensor = x if isinstance(x, torch.Tensor) else getattr(x, "base", None)
        if isinstance(tensor, torch.Tensor) and tensor.is_cuda:
            return tensor.device.index
    return None


def _launch(
    kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], named: dict[str, Any]
) -> tuple[Any, tuple[Any, ...], int]:
    """Launch; the compiled kernel, the parameters behind `args` and the device."""
    device = torch.cuda.current_device()
    key = (id(kernel), device, *map(_kind, args), *named, *named.values())
    ready = _READY.get(key)
    if ready is None:
        compiled = kernel[grid](*args, **COMMON_OPTIONS, **named)
        behind = list(kernel.signature.parameters.values())[len(args) :]
        rest = tuple(named.get(p.name, p.default) for p in behind)
        _READY[key] = (compiled, rest)
        layouts = [x.layout for x in args if hasattr(x, "layout") and hasattr(x, "block_shape")]
        _ALIVE.update({id(x): x for x in (kernel, *layouts)})
        return compiled, rest, device
    compiled, rest = ready
    compiled[grid + (1,) * (3 - len(grid))](*args, *rest)
    return compiled, rest, device


def _tensor(x: torch.Tensor) -> Any:
    return x.dtype, x.data_ptr() % 16 == 0


def _int(x: int) -> Any:
    if not -_PAST_INT32 <= x < _PAST_INT32:
        return x  # rare: by value
    return "1" if x == 1 else "16" if x % 16 == 0 else "int"


def _float(x: float) -> Any:
    return "float"


_KINDS: dict[type, Callable[[Any], Any]] = {torch.Tensor: _tensor, int: _int, float: _float}


def _kind(x: Any) -> Any:
    """What Triton may compile differently for."""
    kind = _KINDS.get(type(x))
    if kind is not None:
        return kind(x)
    if isinstance(x, torch.Tensor):  # of a subclass
        return _tensor(x)
    if hasattr(x, "block_shape"):  # a TMA descriptor
        return x.base.dtype, id(getattr(x, "layout", None)), *x.block_shape
    return type(x), x
