# SPDX-License-Identifier: Apache-2.0
"""Runs the Python of a Gluon kernel on numpy arrays, one program after the other.

Gluon has no interpreter. What this shows is what a kernel reads, adds up and writes: not layouts,
nor what runs at the same time. Here a load has landed as soon as it is asked for. Whether a kernel
waits for it, and its warpgroups for each other, tests/kernels/warpgroups shows.
"""

import inspect
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from triton.experimental.gluon import language as gl
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITCallable

DTYPES = {
    "int32": np.int32,
    "int64": np.int64,
    "float32": np.float32,
    "float16": np.float16,
    "uint8": np.uint8,
    "float8e4nv": np.uint8,  # its codes
}
NUMPY = {getattr(gl, name): dtype for name, dtype in DTYPES.items()}


class Array(np.ndarray):
    """A tensor or, with no dimension, a scalar."""

    @property
    def type(self):
        return types.SimpleNamespace(layout=None)

    # Other names of it keep their value, as in Triton.
    def __iadd__(self, other):  # type: ignore[misc,override]
        return self + other

    def __isub__(self, other):  # type: ignore[misc,override]
        return self - other

    def to(self, dtype, bitcast=False):
        return array(self.view(NUMPY[dtype]) if bitcast else self.astype(NUMPY[dtype]))


def array(x):
    return np.asarray(x).view(Array)


@dataclass
class Pointer:
    """Into the elements of a contiguous array."""

    memory: np.ndarray
    offset: Any = 0

    def __add__(self, more):
        return Pointer(self.memory, self.offset + np.asarray(more, np.int64))

    def places(self, mask):
        places, mask = np.broadcast_arrays(self.offset, True if mask is None else mask)
        assert ((places >= 0) & (places < self.memory.size) | ~mask).all(), "out of the array"
        return places, mask


@dataclass
class Barrier:
    expected: int = 0
    arrived: int = 0
    phase: int = 0


@dataclass
class Shared:
    """Of allocate_shared_memory: NaN, or all ones, until it is written."""

    data: Any
    barriers: list[Barrier] = field(default_factory=list)

    def index(self, i):
        return self.barriers[int(i)] if self.barriers else Shared(self.data[int(i)])

    def slice(self, start, length):
        return Shared(self.data[start : start + length])

    def store(self, x):
        self.data[...] = x

    def load(self, _layout=None):
        return array(self.data.copy())

    def permute(self, order):
        return Shared(self.data.transpose(order))


def allocate_shared_memory(dtype, shape, _layout):
    barriers = [Barrier() for _ in range(shape[0])] if dtype == gl.int64 else []
    data = np.empty(shape, NUMPY[dtype])
    data.view(np.uint8)[...] = 0xFF
    return Shared(data, barriers)


def wait(barrier, phase):
    assert barrier.phase != int(phase), "it would wait for ever: nothing was asked for"
    assert barrier.expected == barrier.arrived == 0, "not all has come"


def expect(barrier, bytes_):
    assert barrier.expected == 0, "asked for twice"
    barrier.expected = int(bytes_)


def tma_load(desc, at, barrier, into):
    """`desc`: the tensor [lines, bytes]."""
    lines = into.data.shape[0]
    assert 0 <= at[0] and at[0] + lines <= len(desc), "a page outside the cache"
    into.data[...] = desc[int(at[0]) : int(at[0]) + lines]
    barrier.arrived += into.data.nbytes
    if barrier.arrived == barrier.expected:
        barrier.expected = barrier.arrived = 0
        barrier.phase ^= 1


def load(pointer, mask=None, other=0):
    places, mask = pointer.places(mask)
    return array(
        np.where(mask, pointer.memory[np.where(mask, places, 0)], other).astype(
            pointer.memory.dtype
        )
    )


def store(pointer, x, mask=None):
    places, mask = pointer.places(mask)
    pointer.memory[places[mask]] = np.broadcast_to(x, places.shape)[mask]


def decoded(codes):
    """e4m3 bytes as fp16."""
    return array(torch.from_numpy(np.array(codes)).view(torch.float8_e4m3fn).half().numpy())


def warpgroup_mma(a, b, acc, use_acc, is_async=False):
    a, b = (x.data if isinstance(x, Shared) else np.asarray(x) for x in (a, b))
    a, b = (decoded(x) if x.dtype == np.uint8 else x for x in (a, b))
    return array(np.asarray(a, np.float32) @ np.asarray(b, np.float32))


def language(programs, program):
    """What `gl` stands for in a kernel's code."""
    return types.SimpleNamespace(
        **{name: getattr(gl, name) for name in DTYPES},
        constexpr=gl.constexpr,
        arange=lambda start, stop, _layout=None: array(np.arange(start, stop, dtype=np.int32)),
        to_tensor=lambda x: array(np.int32(x)),
        zeros=lambda shape, dtype, _layout: array(np.zeros(shape, NUMPY[dtype])),
        static_range=range,
        load=load,
        store=store,
        where=lambda c, a, b: array(np.where(c, a, b)),
        minimum=lambda a, b: array(np.minimum(a, b)),
        maximum=lambda a, b, propagate_nan=None: array(np.maximum(a, b)),
        sum=lambda x, axis: array(np.asarray(x).sum(axis)),
        max=lambda x, axis: array(np.asarray(x).max(axis)),
        cdiv=lambda a, b: array(-(-a // b)),
        reshape=lambda x, shape: array(np.reshape(x, [int(n) for n in shape])),
        permute=lambda x, order: array(np.transpose(x, order)),
        split=lambda x: (array(x[..., 0]), array(x[..., 1])),
        associative_scan=lambda x, _axis, _add: array(np.cumsum(x, dtype=np.int32)),
        convert_layout=lambda x, _layout, assert_trivial=False: x,
        num_programs=lambda _axis: programs,
        program_id=lambda _axis: array(np.int32(program)),
        allocate_shared_memory=allocate_shared_memory,
        **dict.fromkeys(
            ("SliceLayout", "DotOperandLayout", "NVMMADistributedLayout"), lambda *_, **__: None
        ),
    )


HARDWARE = {
    "mbarrier": types.SimpleNamespace(
        init=lambda *_, **__: None, expect=expect, wait=wait, MBarrierLayout=lambda: None
    ),
    "tma_load": tma_load,
    "warpgroup_mma": warpgroup_mma,
    "warpgroup_mma_wait": lambda _left, deps: deps if len(deps) > 1 else deps[0],
    "reinterpret": lambda tile, dtype, shape, _layout: Shared(
        tile.data.reshape(-1).view(NUMPY[dtype]).reshape([int(n) for n in shape])
    ),
    "to_f16": decoded,
    **dict.fromkeys(
        ("fence_async_shared", "cta_barrier", "gdc_launch_dependents"), lambda *_, **__: None
    ),
}


def run(kernel, grid, *args, **constants):
    """As `mla_kernels.triton_common.launch.launch`, on CPU tensors; a descriptor is the tensor that
    it is of."""
    given = [getattr(arg, "base", arg) for arg in args]
    on_numpy = [
        Pointer(arg.reshape(-1).numpy()) if isinstance(arg, torch.Tensor) else arg for arg in given
    ]
    names = kernel.arg_names
    for i, (name, arg) in enumerate(zip(names, given, strict=False)):
        if name.endswith("_desc"):
            on_numpy[i] = arg.numpy()
    constants = {name: x for name, x in constants.items() if name in names}
    for program in range(grid[0]):
        with np.errstate(all="ignore"):  # unused rows hold junk
            with_hardware(kernel, language(grid[0], program))(*on_numpy, **constants)


def record(aggregate):
    """Its values by the names of `__init__`."""
    init = aggregate.hash_attrs[0]
    names = list(inspect.signature(init.fn).parameters)[1:]
    return lambda *values: types.SimpleNamespace(**dict(zip(names, values, strict=True)))


def with_hardware(kernel, gl_, hardware=HARDWARE):
    """The Python function of a kernel, in whose module names mean what `hardware` says; names of
    Python too."""
    made: dict[int, Callable[..., Any]] = {}  # by id: a kernel's own hash would compile-check it

    def function(jit: Any) -> Callable[..., Any]:
        if id(jit) not in made:
            names: dict[str, Any] = dict(hardware)
            made[id(jit)] = types.FunctionType(
                jit.fn.__code__, names, jit.fn.__name__, jit.fn.__defaults__
            )
            for name, x in jit.fn.__globals__.items():
                if name in hardware:
                    x = hardware[name]
                elif name in ("gl", "tl"):
                    x = gl_
                elif isinstance(x, gl.constexpr):
                    x = x.value
                elif isinstance(x, JITCallable | InterpretedFunction):
                    x = function(x)
                elif getattr(x, "__triton_aggregate__", False):
                    x = record(x)
                names[name] = x
        return made[id(jit)]

    return function(kernel)
