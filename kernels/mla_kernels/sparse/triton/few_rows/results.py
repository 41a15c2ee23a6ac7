# SPDX-License-Identifier: Apache-2.0
"""Writing what a program of the few-rows sparse kernel found, as a Gluon device function."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from mla_kernels.decode.triton.few_rows.copies import indices
from mla_kernels.decode.triton.few_rows.results import per_row
from mla_kernels.sparse.triton.results import log_sum, one_over_sum


@gluon.jit
def write_program(
    o, l, k, out_ptr, lse_ptr, sink_ptr, part_acc_ptr, part_sum_ptr, result, first_head,
    num_heads, HAS_SINK: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    """o [groups, BM, 128], at the rows result + head of the results or of the partials."""
    GROUPS: gl.constexpr = o.shape[0]
    BM: gl.constexpr = o.shape[1]
    L: gl.constexpr = o.type.layout
    ROW: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, L))
    group, row, column = indices(L, GROUPS, BM, 128)
    at = (result + first_head + row) * (GROUPS * 128) + group * 128 + column
    mask = first_head + row < num_heads
    head = first_head + gl.arange(0, BM, ROW)
    ok = head < num_heads
    l = gl.convert_layout(l, ROW)
    k = gl.convert_layout(k, ROW)
    if SPLIT:
        gl.store(part_acc_ptr + at, o, mask=mask)
        sum_at = part_sum_ptr + (result + head) * 2
        gl.store(sum_at, l, mask=ok)
        gl.store(sum_at + 1, k, mask=ok)
    else:
        factor = one_over_sum(l, k, sink_ptr, head, ok, HAS_SINK)
        o = o * per_row(factor)
        gl.store(out_ptr + at, o.to(out_ptr.dtype.element_ty), mask=mask)
        gl.store(lse_ptr + result + head, log_sum(l, k), mask=ok)
