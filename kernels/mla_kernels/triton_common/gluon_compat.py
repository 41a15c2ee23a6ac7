# SPDX-License-Identifier: Apache-2.0
"""Gluon names that changed between Triton 3.6 and 3.9: the only place that knows them."""

import math

import triton
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.language import core
from triton.language.core import _unwrap_if_constexpr as unwrap

tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
tma_store_wait = tma.store_wait
copy_to_shared = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
cta_barrier = getattr(gl, "barrier", None) or gl.thread_barrier
aggregate = getattr(core, "aggregate", None) or core._aggregate
# Whether shared memory may be seen as a smaller tile; 3.8 alone refuses that.
PARTIAL_VIEWS = gl.constexpr(not triton.__version__.startswith("3.8."))


def _view(tile, dtype, shape, layout, semantic, partial):
    shape = [int(unwrap(size)) for size in shape]
    whole = list(tile.type.alloc_shape[-len(tile.shape) :]) == list(tile.shape)
    taken = math.prod(shape) * unwrap(dtype).primitive_bitwidth
    whole = whole and taken == math.prod(tile.shape) * tile.dtype.primitive_bitwidth
    if not (whole or partial):
        raise ValueError(f"{shape} of {unwrap(dtype)} must be all of a tile, got {tile.type}")
    method = getattr(tile, "reinterpret", None) or tile._reinterpret
    return method(dtype, shape, layout, _semantic=semantic)


@builtin
def reinterpret(tile, dtype, shape, layout, _semantic=None):
    """The shared memory of `tile` with another dtype, shape and layout: all of it, not of a slice,
    or with 3.8 it does not compile."""
    return _view(tile, dtype, shape, layout, _semantic, partial=False)


@builtin
def first_part(tile, dtype, shape, layout, _semantic=None):
    """The same, if PARTIAL_VIEWS of no more than the first part of `tile`."""
    return _view(tile, dtype, shape, layout, _semantic, partial=PARTIAL_VIEWS.value)
