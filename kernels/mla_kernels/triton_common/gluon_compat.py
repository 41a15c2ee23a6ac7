# SPDX-License-Identifier: Apache-2.0
"""Gluon names that changed between Triton 3.6 and 3.9: the only place that knows them."""

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.language import core

tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
tma_store_wait = tma.store_wait
copy_to_shared = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
cta_barrier = getattr(gl, "barrier", None) or gl.thread_barrier
aggregate = getattr(core, "aggregate", None) or core._aggregate


@builtin
def reinterpret(tile, dtype, shape, layout, _semantic=None):
    """The shared memory of `tile` with another dtype, shape and layout."""
    method = getattr(tile, "reinterpret", None) or tile._reinterpret
    return method(dtype, shape, layout, _semantic=_semantic)
