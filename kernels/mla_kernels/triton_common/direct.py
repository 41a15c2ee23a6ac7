# SPDX-License-Identifier: Apache-2.0
"""A compiled kernel's launch with everything in place but the addresses.

Goes to the C function that Triton makes for a kernel, with numbers for pointers, which it does not
look up, and with TMA descriptors that were encoded before. That function's arguments are Triton's
own business, so their form is compared with the one known here; for another `prepare` says no.
"""

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from triton import knobs
from triton.backends.nvidia import driver

# What the C function parses. Triton 3.6 makes one for each kernel: grid, stream, function,
# cooperative, PDL, two kinds of scratch memory, metadata for itself and for hooks, two hooks, then
# the kernel's own arguments. From 3.7 to 3.9 one serves all kernels: the same, but scratch memory
# behind the hooks and metadata taken apart, then two descriptions of the kernel's arguments and the
# list of them.
_FORM_OF_A_KERNEL = "iiiKKppOOOOOO"
_FORM_OF_ALL = "iiiKKpp(iii)OOOOOOy*O"
_STREAM = 3
# What the function around it that encodes TMA descriptors holds on to.
_CLOSURES = (
    {"launcher", "tensordesc_indices", "tensordesc_meta"},
    {"launcher", "tensordesc_meta", "signature", "relevant_paths", "make_tensordesc_arg"},
)
# Encoded descriptors of one form: more than an engine has layers. And how many forms.
_MOST_BOXES, _MOST_FORMS = 256, 2048

# Which operand of a call a tensor is, and how many bytes into it it starts; None: none.
Find = Callable[[torch.Tensor], tuple[int, int] | None]


@dataclass(frozen=True)
class DirectLaunch:
    """One launch; `__call__` with the addresses of the call's operands.

    header    the C function's arguments before the kernel's own
    values    the kernel's own; with `listed` they are one argument, a list
    pointers  (place in `values`, operand, offset in bytes), boxes the same for TMA descriptors
    """

    function: Callable[..., None]
    header: list[Any]
    values: list[Any]
    listed: bool
    pointers: list[tuple[int, int, int]]
    boxes: list[tuple[int, int, int, "_Boxes"]]

    def __call__(
        self, addresses: Sequence[int], stream: int, grid: tuple[int, int, int] | None
    ) -> None:
        header, values = self.header.copy(), self.values.copy()
        header[_STREAM] = stream
        if grid is not None:
            header[:_STREAM] = grid
        for place, operand, offset in self.pointers:
            values[place] = addresses[operand] + offset
        for place, operand, offset, boxes in self.boxes:
            values[place] = boxes[addresses[operand] + offset]
        if self.listed:
            self.function(*header, values)
        else:
            self.function(*header, *values)


class Replay:
    """The launches of a call on `device`, for operands at other addresses."""

    def __init__(
        self, launches: list[DirectLaunch], temporaries: Iterable[torch.Tensor], device: int
    ) -> None:
        """temporaries: count as operands behind those of the call, each replay has its own."""
        self._launches = launches
        self._like = [(x.shape, x.stride(), x.dtype, x.device) for x in temporaries]
        self._device = device

    def ready(self) -> bool:
        """Whether this is the current device and nobody (a profiler) wants to see launches through
        Triton, which these are not."""
        runtime = knobs.runtime
        hooks = runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls
        return not hooks and torch.cuda.current_device() == self._device

    def __call__(
        self, operands: Iterable[torch.Tensor], grid: tuple[int, int, int] | None = None
    ) -> None:
        """Operands of the recorded ones' `kind` and in their order.

        grid  another than the recorded one, where it alone depends on a size that is not in the key
        """
        addresses = [x.data_ptr() for x in operands]
        temporaries = [
            torch.empty_strided(shape, strides, dtype=dtype, device=device)
            for shape, strides, dtype, device in self._like
        ]
        addresses += [x.data_ptr() for x in temporaries]
        stream = torch._C._cuda_getCurrentRawStream(self._device)
        for launch in self._launches:
            launch(addresses, stream, grid)


class _Boxes(dict[int, Any]):
    """Encoded TMA descriptors of one form (shape, strides, box, layout), by address."""

    def __init__(self, descriptor: Any, meta: Any) -> None:
        self._meta = meta
        self._like = {name: getattr(descriptor, name, None) for name in _OF_A_BOX}

    def arguments(self, address: int) -> list[Any]:
        """What Triton makes of a descriptor: the encoded one, shape and strides."""
        base = SimpleNamespace(data_ptr=lambda: address)
        like = SimpleNamespace(base=base, **self._like)
        # From 3.9 on there is a third parameter, of no use to an NVIDIA GPU.
        unused = [None] * (len(inspect.signature(driver.make_tensordesc_arg).parameters) - 2)
        made: list[Any] = driver.make_tensordesc_arg(like, self._meta, *unused)
        return made

    def __missing__(self, address: int) -> Any:
        if len(self) >= _MOST_BOXES:
            self.clear()
        self[address] = encoded = self.arguments(address)[0]
        return encoded


# `round_f32_to_tf32` is new in 3.7.
_OF_A_BOX = ("shape", "strides", "padding", "round_f32_to_tf32")
_FORMS: dict[Any, _Boxes] = {}


def _boxes_of(descriptor: Any, meta: Any) -> _Boxes:
    """Those of the descriptor's form, which all launches share: layers have caches of one form."""
    form = (*(repr(getattr(descriptor, name, None)) for name in _OF_A_BOX), repr(meta))
    if form not in _FORMS:
        if len(_FORMS) >= _MOST_FORMS:
            _FORMS.clear()  # launches keep theirs
        _FORMS[form] = _Boxes(descriptor, meta)
    return _FORMS[form]


def prepare(
    compiled: Any, grid: tuple[int, ...], args: Sequence[Any], find: Find
) -> DirectLaunch | None:
    """The launch `compiled[grid](*args)` as a `DirectLaunch`; None if an argument is no operand's
    or Triton's launcher is not the one known here.

    args  all parameters of the kernel in order, constants too
    """
    launcher = _launcher(compiled.run)
    if launcher is None:
        return None
    function, metas = launcher
    listed, metas = _of_all(compiled.run), list(metas)
    header = [*grid, *(1,) * (3 - len(grid)), *_header(compiled)]
    values: list[Any] = []
    pointers, boxes = [], []
    for arg in args:
        if isinstance(arg, torch.Tensor):
            found = find(arg)
            if found is None:
                return None
            pointers.append((len(values), *found))
            values.append(0)
        elif hasattr(arg, "block_shape"):
            found, meta = find(arg.base), metas.pop(0)
            if found is None or meta is None:
                return None
            encoded = _boxes_of(arg, meta)
            boxes.append((len(values), *found, encoded))
            values += encoded.arguments(arg.base.data_ptr())
        else:
            values.append(arg)
    return DirectLaunch(function, header, values, listed, pointers, boxes)


def _of_all(run: Any) -> bool:
    """Whether the C function of this launcher is one for all kernels."""
    return hasattr(run, "kernel_signature")


def _header(compiled: Any) -> list[Any]:
    """What the C function takes between the grid and the kernel's own arguments; stream 0."""
    run, metadata = compiled.run, compiled.packed_metadata
    header = [0, compiled.function, run.launch_cooperative_grid, run.launch_pdl]
    scratch, for_hooks, hooks = [None, None], [None], [None, None]
    if not _of_all(run):
        return [*header, *scratch, metadata, *for_hooks, *hooks]
    described = [run.arg_annotations, run.kernel_signature]
    return [*header, metadata, *for_hooks, *hooks, *scratch, *described]


def _launcher(run: Any) -> tuple[Callable[..., None], Sequence[Any]] | None:
    """The C function of a kernel's launcher, and how its TMA descriptors are encoded."""
    if not _form_is_known(_of_all(run)):
        return None
    if run.global_scratch_size or run.profile_scratch_size or getattr(run, "gsan_enabled", False):
        return None
    if not inspect.isfunction(run.launch):
        return run.launch, ()
    names, cells = run.launch.__code__.co_freevars, run.launch.__closure__ or ()
    closure = {name: cell.cell_contents for name, cell in zip(names, cells, strict=True)}
    if set(closure) not in _CLOSURES:
        return None
    return closure["launcher"], closure["tensordesc_meta"]


def _form_is_known(of_all: bool) -> bool:
    """Whether Triton's C function, one of all kernels or of each, takes what is known here."""
    if of_all:
        return f'"{_FORM_OF_ALL}"' in _source()
    return getattr(driver, "_BASE_ARGS_FORMAT", None) == _FORM_OF_A_KERNEL


@functools.cache
def _source() -> str:
    """Of the C functions that Triton compiles on the machine."""
    path = Path(driver.__file__).with_name("driver.c")
    return path.read_text() if path.is_file() else ""
