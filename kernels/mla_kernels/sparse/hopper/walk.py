# SPDX-License-Identifier: Apache-2.0
"""Which tokens' slots a program attends to, where it is not one range of one token."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from mla_kernels.decode.hopper.layouts import BLOCK
from mla_kernels.sparse.hopper.gather import Rows
from mla_kernels.triton_common.gluon_compat import aggregate


@aggregate
class Walk:
    """A program's tokens: first, first + step, and so on below `end`; of the first the slots from
    `start` on, of the last those before `stop`. `piece`: how many programs have the first token's
    slots before `start`."""

    first: gl.tensor
    step: gl.tensor
    end: gl.tensor
    start: gl.tensor
    stop: gl.tensor
    piece: gl.tensor

    @gluon.constexpr_function
    def __init__(self, first, step, end, start, stop, piece):
        self.first = first
        self.step = step
        self.end = end
        self.start = start
        self.stop = stop
        self.piece = piece


@gluon.jit
def program_walk(num_tokens, K, span, SHARES: gl.constexpr):
    """Every num_programs(0)-th token, whole; with SHARES `span` slots of all tokens' on end, each
    token's padded to whole tiles."""
    program = gl.program_id(0)
    if SHARES:
        tiles = (K + BLOCK - 1) // BLOCK
        share = span // BLOCK
        lo = program * share
        hi = gl.minimum(lo + share, num_tokens * tiles)
        first = lo // tiles
        last = (hi - 1) // tiles
        return Walk(
            first, gl.to_tensor(1), last + 1, (lo - first * tiles) * BLOCK,
            (hi - last * tiles) * BLOCK, program - first * tiles // share,
        )  # fmt: skip
    else:
        zero = gl.to_tensor(0)
        return Walk(program, gl.num_programs(0), num_tokens, zero, K, zero)


@gluon.jit
def row_of(token, stride):
    return token.to(gl.int64) * stride


@gluon.jit
def part_of(walk, token, splits):
    """Which partial result a program's share of a token is, of `splits` for each token."""
    return token.to(gl.int64) * splits + gl.where(token == walk.first, walk.piece, 0)


@gluon.jit
def walk_rows(
    walk, token, slots, slots_stride, lengths, K, num_slots, page_stride,
    PAGE: gl.constexpr, ROW: gl.constexpr, HAS_LENGTHS: gl.constexpr,
):  # fmt: skip
    """The Rows of a program's share of a token."""
    limit = gl.where(token + 1 == walk.end, gl.minimum(walk.stop, K), K)
    if HAS_LENGTHS:
        limit = gl.minimum(gl.load(lengths + token), limit)
    start = gl.where(token == walk.first, walk.start, 0)
    slots = slots + row_of(token, slots_stride)
    return Rows(slots, start, gl.maximum(limit, start), num_slots, page_stride, PAGE, ROW)
