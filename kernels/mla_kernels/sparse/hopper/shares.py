# SPDX-License-Identifier: Apache-2.0
"""Tokens in equal shares: each program of one wave has as many tiles, of one token or of the end of
one and the beginning of the next (walk.py)."""

from functools import cache

from mla_kernels.decode.hopper.support import BLOCK
from mla_kernels.sparse.triton.tiles import Split


@cache
def share_split(T: int, row_tiles: int, K: int, sms: int) -> Split | None:
    """T tokens of K slots over all SMs; None if a share would hold a whole token. So a share has
    slots of two tokens at most, which the kernel's barriers rely on (kernel.py)."""
    tiles = -(-K // BLOCK)
    share = -(-T * tiles // max(1, sms // row_tiles))
    if not 0 < share < tiles:
        return None
    firsts = (t * tiles for t in range(T))
    most = max((first + tiles - 1) // share - first // share + 1 for first in firsts)
    return Split(most, share * BLOCK, shares=True)
