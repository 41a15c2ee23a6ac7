# SPDX-License-Identifier: Apache-2.0
"""The query tile as operands of q K^T, 16 units at a time (few_rows/operands.py)."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from mla_kernels.decode.triton.few_rows.query import load_latent, load_rope, query_operands

STEP = gl.constexpr(16)  # units that one mma reduces over


@gluon.jit
def units_of(shared, c: gl.constexpr, LAYOUT: gl.constexpr):
    """The c-th units of [groups, rows, units]."""
    return shared.slice(c * STEP, STEP, dim=2).load(LAYOUT)


@gluon.jit
def load_query(
    at, stride_s, stride_h, num_rows, num_heads, a_shared, b_shared, rope_shared,
    DR: gl.constexpr, LAYOUT: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """(a, the first units of b, up): this program's rows of the request at `at`, in registers; all
    of b is in b_shared and the rope part in rope_shared. a_shared is free again."""
    GROUPS: gl.constexpr = b_shared.shape[0]
    BM: gl.constexpr = b_shared.shape[1]
    first = gl.program_id(0) * BM
    q = load_latent(at, first, stride_s, stride_h, num_rows, num_heads, GROUPS, BM, WARPS)
    rope = load_rope(
        at, first, stride_s, stride_h, num_rows, num_heads, GROUPS * 128, BM, DR, WARPS
    )
    _a, _b, up = query_operands(q, rope, a_shared, rope_shared, LAYOUT, "fp8", b_shared)
    a = (
        units_of(a_shared, 0, LAYOUT).to(gl.float16, bitcast=True),
        units_of(a_shared, 1, LAYOUT).to(gl.float16, bitcast=True),
        units_of(a_shared, 2, LAYOUT).to(gl.float16, bitcast=True),
        units_of(a_shared, 3, LAYOUT).to(gl.float16, bitcast=True),
    )
    return a, units_of(b_shared, 0, LAYOUT), up
