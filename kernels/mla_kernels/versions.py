# SPDX-License-Identifier: Apache-2.0
"""Which versions of Triton the kernels are written for."""

import functools
import importlib.metadata
import importlib.util
import re

# Older ones have not the Gluon that the kernels are written in.
OLDEST_TRITON = (3, 6)
# The newest that has compiled them (`python -m mla_kernels.offline`).
NEWEST_TRITON = (3, 9)
# torch's builds for other GPUs call the package by other names.
_DISTRIBUTIONS = ("triton", "triton-rocm", "pytorch-triton", "pytorch-triton-rocm")


@functools.cache
def no_triton() -> str | None:
    """Why there is no Triton that compiles the kernels; None if there is."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    for name in _DISTRIBUTIONS:
        try:
            installed = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        numbers = tuple(map(int, re.findall(r"\d+", installed)[:2]))
        if numbers < OLDEST_TRITON:
            needed = "{}.{}".format(*OLDEST_TRITON)
            return f"it needs triton {needed} or newer, {installed} is installed"
        break
    return None
