# SPDX-License-Identifier: Apache-2.0
"""What a call launches, remembered for calls that differ in addresses only.

Between its arguments and its launches a function checks shapes, chooses kernels and tiles, makes
views and TMA descriptors: on the host, for longer than the kernels of a short step run. All of it
follows from what `kind` keeps of each argument, so the first call of a kind is recorded and the
others are replayed with the addresses of their tensors. What cannot be followed (a launch with a
tensor that is no operand's, any operation of torch but a view or the allocation of a temporary) is
never replayed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

if TYPE_CHECKING:
    from mla_kernels.triton_common.direct import DirectLaunch, Replay

_LOCAL = threading.local()

Tensor = torch.Tensor
_READS = {
    *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "requires_grad")),
    Tensor.size,
    Tensor.stride,
    Tensor.dim,
    Tensor.numel,
    Tensor.element_size,
    Tensor.is_contiguous,
    Tensor.data_ptr,
    Tensor.__len__,
}
_VIEWS = {
    Tensor.view,
    Tensor.flatten,
    Tensor.unflatten,
    Tensor.as_strided,
    Tensor.transpose,
    Tensor.split,
    Tensor.squeeze,
    Tensor.unsqueeze,
    Tensor.__getitem__,
}
_TEMPORARIES = {torch.empty, Tensor.new_empty}


def kind(x: Any) -> Any:
    """What a call may depend on of an argument: of a tensor all but its contents and its address,
    of that the place within 16 bytes (alignment.row_alignment)."""
    if isinstance(x, Tensor):
        place = x.device, x.data_ptr() % 16
        return type(x), x.shape, x.stride(), x.dtype, *place, x.requires_grad
    if isinstance(x, tuple):
        return tuple(map(kind, x))
    return type(x), x


def rows_kind(x: Any) -> Any:
    """`kind` of a tensor with any number of rows: for a call whose grid alone depends on it."""
    if not isinstance(x, Tensor):
        return kind(x)
    return type(x), x.shape[1:], x.stride(), x.dtype, x.device, x.data_ptr() % 16


class Recordings:
    """Recorded calls by a key that holds everything they depend on but addresses.

    Keeps no tensor alive. A copy starts empty.
    """

    def __init__(self, most: int = 64) -> None:
        self._most = most
        self._found: dict[Any, Replay | None] = {}

    def find(self, key: Any) -> Replay | None:
        """What was recorded for `key`, if it can be replayed here and now."""
        try:
            replay = self._found.get(key)
        except TypeError:  # not hashable: no argument that fits is
            return None
        if replay is None or recording() is not None or not replay.ready():
            return None
        return replay

    def record(self, key: Any, operands: Sequence[Tensor], call: Callable[[], None]) -> None:
        """Do `call` and remember what it launched; what it uses of tensors are the operands."""
        if key in self._found or recording() is not None:
            call()  # cannot be replayed, or is part of what is being recorded
            return
        new = Recording(operands)
        with new:
            call()
        if len(self._found) >= self._most:
            self._found.clear()
        self._found[key] = new.replay()

    def __reduce__(self) -> Any:
        return Recordings, (self._most,)


class Recording(TorchFunctionMode):
    """While entered, follows operands and temporaries through views and notes what `launch`
    launches."""

    def __init__(self, operands: Sequence[Tensor]) -> None:
        self._operands = operands
        # Operand and offset in bytes, by the id of a tensor that is kept alive.
        self._found = {id(x): (i, 0) for i, x in enumerate(operands)}
        self._alive: list[Tensor] = []
        self._temporaries: list[Tensor] = []
        self._launches: list[DirectLaunch] = []
        self._device: int | None = None
        # Of one tensor in two roles it is not known which a launch means.
        self._usable = len(self._found) == len(operands)

    def __enter__(self) -> Recording:
        _LOCAL.recording = self
        super().__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        _LOCAL.recording = None

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **kwargs) if kwargs else func(*args)
        if func in _READS:
            return result
        if func in _VIEWS:
            for view in result if isinstance(result, (tuple, list)) else (result,):
                self._follow(args[0], view)
        elif func in _TEMPORARIES and type(result) is Tensor:
            self._found[id(result)] = len(self._operands) + len(self._temporaries), 0
            self._temporaries.append(result)
        else:
            self.spoil()
        return result

    def _follow(self, base: Tensor, view: Tensor) -> None:
        if id(base) not in self._found:
            return
        if view.untyped_storage().data_ptr() != base.untyped_storage().data_ptr():
            self.spoil()  # a copy
            return
        operand, offset = self._found[id(base)]
        self._found[id(view)] = operand, offset + view.data_ptr() - base.data_ptr()
        self._alive.append(view)

    def spoil(self) -> None:
        """Something happened that a replay would leave out."""
        self._usable = False

    def note(self, compiled: Any, grid: tuple[int, ...], args: Sequence[Any], device: int) -> None:
        """A launch of `compiled` with all parameters `args`."""
        if not self._usable or self._device not in (None, device):
            self.spoil()
            return
        self._device = device
        from mla_kernels.triton_common.direct import prepare

        launch = prepare(compiled, grid, args, lambda x: self._found.get(id(x)))
        if launch is None:
            self.spoil()
        else:
            self._launches.append(launch)

    def replay(self) -> Replay | None:
        """What was recorded; None if it cannot be replayed."""
        if not self._usable or self._device is None:
            return None
        from mla_kernels.triton_common.direct import Replay

        return Replay(self._launches, self._temporaries, self._device)


def recording() -> Recording | None:
    """The recording that is going on in this thread."""
    found: Recording | None = getattr(_LOCAL, "recording", None)
    return found
