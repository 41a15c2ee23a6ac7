# SPDX-License-Identifier: Apache-2.0
"""A compiled kernel's launch with everything in place but the addresses.

Goes to the C function that Triton makes for a kernel, with numbers for pointers, which it does not
look up, and with TMA descriptors that were encoded before. That function's arguments are Triton's
own business, so their form is compared with the one known here; for another `prepare` says no.
"""

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from triton import knobs
from triton.backends.nvidia import driver

# Of the C function, before the kernel's own: grid, stream, function, cooperative, PDL, two kinds of
# scratch memory, metadata for itself and for hooks, two hooks (Triton 3.6).
_FORM = "iiiKKppOOOOOO"
_STREAM = 3
_CLOSURE = {"launcher", "tensordesc_indices", "tensordesc_meta"}
# Encoded descriptors of one form: more than an engine has layers. And how many forms.
_MOST_BOXES, _MOST_FORMS = 256, 2048

# Which operand of a call a tensor is, and how many bytes into it it starts; None: none.
Find = Callable[[torch.Tensor], tuple[int, int] | None]


@dataclass(frozen=True)
class DirectLaunch:
    """One launch; `__call__` with the addresses of the call's operands.

    values    the C function's arguments
    pointers  (place among them, operand, offset in bytes), boxes the same for TMA descriptors
    """

    function: Callable[..., None]
    values: list[Any]
    pointers: list[tuple[int, int, int]]
    boxes: list[tuple[int, int, int, "_Boxes"]]

    def __call__(
        self, addresses: Sequence[int], stream: int, grid: tuple[int, int, int] | None
    ) -> None:
        values = self.values.copy()
        values[_STREAM] = stream
        if grid is not None:
            values[:_STREAM] = grid
        for place, operand, offset in self.pointers:
            values[place] = addresses[operand] + offset
        for place, operand, offset, boxes in self.boxes:
            values[place] = boxes[addresses[operand] + offset]
        self.function(*values)


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
        self._like = {name: getattr(descriptor, name) for name in ("shape", "strides", "padding")}

    def arguments(self, address: int) -> list[Any]:
        """What Triton makes of a descriptor: the encoded one, shape and strides."""
        base = SimpleNamespace(data_ptr=lambda: address)
        like = SimpleNamespace(base=base, **self._like)
        made: list[Any] = driver.make_tensordesc_arg(like, self._meta)
        return made

    def __missing__(self, address: int) -> Any:
        if len(self) >= _MOST_BOXES:
            self.clear()
        self[address] = encoded = self.arguments(address)[0]
        return encoded


_FORMS: dict[Any, _Boxes] = {}


def _boxes_of(descriptor: Any, meta: Any) -> _Boxes:
    """Those of the descriptor's form, which all launches share: layers have caches of one form."""
    form = (*descriptor.shape, *descriptor.strides, descriptor.padding, repr(meta))
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
    launcher = _launcher(compiled)
    if launcher is None:
        return None
    function, metas = launcher
    run, metas = compiled.run, list(metas)
    values: list[Any] = [*grid, *(1,) * (3 - len(grid)), 0, compiled.function]
    values += [run.launch_cooperative_grid, run.launch_pdl, None, None]
    values += [compiled.packed_metadata, None, None, None]
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
    return DirectLaunch(function, values, pointers, boxes)


def _launcher(compiled: Any) -> tuple[Callable[..., None], Sequence[Any]] | None:
    """Triton's C function for a kernel, and how its TMA descriptors are encoded."""
    run = compiled.run
    if getattr(driver, "_BASE_ARGS_FORMAT", None) != _FORM:
        return None
    if run.global_scratch_size or run.profile_scratch_size:
        return None
    if not inspect.isfunction(run.launch):
        return run.launch, ()
    names, cells = run.launch.__code__.co_freevars, run.launch.__closure__ or ()
    closure = {name: cell.cell_contents for name, cell in zip(names, cells, strict=True)}
    if set(closure) != _CLOSURE:
        return None
    return closure["launcher"], closure["tensordesc_meta"]
