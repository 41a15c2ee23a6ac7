# SPDX-License-Identifier: Apache-2.0
"""Shared memory of a team, and how one team's results of a segment reach the other."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from mla_kernels.decode.hopper.layouts import BLOCK
from mla_kernels.decode.triton.few_rows.results import per_row
from mla_kernels.decode.triton.few_rows_fp8.query import STEP
from mla_kernels.decode.triton.softmax import pow2_int
from mla_kernels.triton_common.gluon_compat import aggregate, reinterpret

SUMS = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 8, [2, 1, 0]))
ROPE_SUMS = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))
ROPE = gl.constexpr(gl.SwizzledSharedLayout(8, 2, 4, [1, 0]))
WEIGHTS = gl.constexpr(gl.SwizzledSharedLayout(8, 4, 2, [2, 1, 0]))
VECTOR = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
RESULTS = gl.constexpr(gl.SwizzledSharedLayout(4, 1, 8, [2, 1, 0]))


@aggregate
class Memory:
    """partial  scores of each group of columns; q's `a` on its way to registers
    rope        scores of the rope columns
    p, factor   weights, and what O is multiplied by
    b, q_rope   q's `b` and its rope columns"""

    partial: gl.shared_memory_descriptor
    rope: gl.shared_memory_descriptor
    p: gl.shared_memory_descriptor
    factor: gl.shared_memory_descriptor
    b: gl.shared_memory_descriptor
    q_rope: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, partial, rope, p, factor, b, q_rope):
        self.partial = partial
        self.rope = rope
        self.p = p
        self.factor = factor
        self.b = b
        self.q_rope = q_rope


@gluon.jit
def team_memory(BM: gl.constexpr):
    return Memory(
        gl.allocate_shared_memory(gl.float32, [4, BM, BLOCK], SUMS),
        gl.allocate_shared_memory(gl.float32, [BM, BLOCK], ROPE_SUMS),
        gl.allocate_shared_memory(gl.float16, [BLOCK // STEP, BM, STEP], WEIGHTS),
        gl.allocate_shared_memory(gl.float32, [BM], VECTOR),
        gl.allocate_shared_memory(gl.float16, [4, BM, 64], SUMS),
        gl.allocate_shared_memory(gl.float16, [2, BM, 32], ROPE),
    )


@gluon.jit
def results_of(ring, at, o):
    """Room for o [4, BM, 128] fp32 where the latent columns of the tile at `at` were."""
    return reinterpret(ring, gl.float32, [ring.shape[0], 4, o.shape[1], 128], RESULTS).index(at)


@gluon.jit
def hand_over(o, l, k, ring, at, sums, to):
    """Leave o in the place of a tile that nobody reads any more, l and k in rows 2 `to` and after
    of `sums`."""
    results_of(ring, at, o).store(o)
    sums.index(2 * to).store(l)
    sums.index(2 * to + 1).store(k)
    fence_async_shared()  # the place is TMA's next


@gluon.jit
def add_results(o, l, k, ring, at, sums, to):
    """(o, l, k) and what was handed over, merged as decode/merge/kernel.py does."""
    O_ROW: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, o.type.layout))
    their_k = sums.index(2 * to + 1).load(k.type.layout)
    k_new = gl.maximum(k, their_k)
    ours, theirs = pow2_int(k - k_new), pow2_int(their_k - k_new)
    l = l * ours + sums.index(2 * to).load(k.type.layout) * theirs
    their_o = results_of(ring, at, o).load(o.type.layout)
    o = o * per_row(gl.convert_layout(ours, O_ROW))
    o = o + their_o * per_row(gl.convert_layout(theirs, O_ROW))
    return o, l, k_new
