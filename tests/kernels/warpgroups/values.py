# SPDX-License-Identifier: Apache-2.0
"""What a modelled kernel computes with: numbers where they decide what it does, else nothing."""

import operator
from types import SimpleNamespace

import numpy as np

ARITHMETIC = [
    "add",
    "sub",
    "mul",
    "floordiv",
    "truediv",
    "mod",
    "and_",
    "or_",
    "xor",
    "lshift",
    "rshift",
]
OTHERS = ["lt", "le", "gt", "ge", "eq", "ne", "neg", "invert"]


class Value:
    """A tensor or scalar; unknown if `data` is None, and so is what is computed from it."""

    dtype = None
    type = SimpleNamespace(layout=None)
    __hash__ = None

    def __init__(self, data=None):
        self.data = data

    def to(self, dtype, bitcast=False):
        return self

    def __bool__(self):
        return True if self.data is None else bool(self.data)

    def __index__(self):
        return int(self.data)

    def __getitem__(self, at):
        return self if self.data is None else Value(np.asarray(self.data)[at])


class Pointer:
    """Elements `at` of an array in global memory, or of one that is never read."""

    dtype = SimpleNamespace(element_ty=SimpleNamespace(primitive_bitwidth=16))

    def __init__(self, name, at=0):
        self.name = name
        self.at = at

    def __add__(self, offset):
        return Pointer(self.name, (Value(self.at) + offset).data)

    def __sub__(self, offset):
        return Pointer(self.name, (Value(self.at) - offset).data)

    def to(self, dtype, bitcast):
        """`at` counts elements of `dtype` from here on."""
        assert np.all(self.at == 0)
        return self


def known(x):
    return x.data if isinstance(x, Value) else x


def on_values(f):
    def apply(*args):
        args = [known(x) for x in args]
        return Value(None if any(x is None for x in args) else f(*args))

    return apply


def unknown(*_, **__):
    return Value()


for name in ARITHMETIC + OTHERS:
    f = getattr(operator, name)
    setattr(Value, f"__{name.strip('_')}__", on_values(f))
    if name in ARITHMETIC:
        reflected = on_values(lambda a, b, f=f: f(b, a))
        setattr(Value, f"__r{name.strip('_')}__", reflected)
