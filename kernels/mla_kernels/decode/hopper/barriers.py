# SPDX-License-Identifier: Apache-2.0
"""The barriers by which the warpgroups of a kernel wait for loads and for each other."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier


@gluon.jit
def barriers(N: gl.constexpr, COUNT: gl.constexpr):
    """N of them, each for COUNT arrivals."""
    bars = gl.allocate_shared_memory(gl.int64, [N, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(N):
        mbarrier.init(bars.index(i), count=COUNT)
    return bars
