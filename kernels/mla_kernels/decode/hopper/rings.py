# SPDX-License-Identifier: Apache-2.0
"""Places of a ring of tiles in shared memory, one after the other."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def ring_next(slot, phase, SIZE: gl.constexpr):
    """The next slot of a ring and the parity that its barrier is waited for with."""
    if SIZE == 1:
        return slot, phase ^ 1
    slot = slot + 1
    wrap = slot == SIZE
    return gl.where(wrap, 0, slot), gl.where(wrap, phase ^ 1, phase)


@gluon.jit
def ring_step(slot, SIZE: gl.constexpr):
    """The next slot of a ring whose barrier is not waited for here."""
    return gl.where(slot + 1 == SIZE, 0, slot + 1)


@gluon.jit
def ring_previous(slot, SIZE: gl.constexpr):
    return gl.where(slot == 0, SIZE - 1, slot - 1)
