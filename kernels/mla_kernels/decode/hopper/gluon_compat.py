# SPDX-License-Identifier: Apache-2.0
"""Gluon names that changed between Triton 3.6, 3.7 and 3.9: the only place that knows versions."""

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.language import core

tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
tma_store_wait = tma.store_wait
cta_barrier = getattr(gl, "barrier", None) or gl.thread_barrier
aggregate = getattr(core, "aggregate", None) or core._aggregate
