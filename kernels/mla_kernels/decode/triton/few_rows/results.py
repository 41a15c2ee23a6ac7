# SPDX-License-Identifier: Apache-2.0
"""Where a part's result goes: to out and lse, or to the workspace that the merge reads."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from mla_kernels import numerics
from mla_kernels.decode.triton.few_rows.copies import indices

LN2 = gl.constexpr(numerics.LN2)


@gluon.jit
def per_row(x):
    """[BM] -> [1, BM, 1]."""
    return gl.expand_dims(gl.expand_dims(x, 0), 2)


@gluon.jit
def write_out(
    o, l, k, scale, out_ptr, lse_ptr, part_acc_ptr, part_sum_ptr, request, splits, slot, num_rows
):
    """o [groups, BM, 128] of a whole request to out and lse; of a split to its workspace slot."""
    GROUPS: gl.constexpr = o.shape[0]
    BM: gl.constexpr = o.shape[1]
    L: gl.constexpr = o.type.layout
    ROW: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, L))
    group, row, column = indices(L, GROUPS, BM, 128)
    row += gl.program_id(0) * BM
    at = row.to(gl.int64) * (GROUPS * 128) + group * 128 + column
    sum_row = gl.program_id(0) * BM + gl.arange(0, BM, ROW)
    l = gl.convert_layout(l, ROW)
    k = gl.convert_layout(k, ROW)
    if splits == 1:
        first = request.to(gl.int64) * num_rows
        seen = l != 0.0  # NaN too
        result = o * per_row(gl.where(seen, 1.0 / l, 0.0) * scale)
        at += first * (GROUPS * 128)
        gl.store(out_ptr + at, result.to(out_ptr.dtype.element_ty), mask=row < num_rows)
        lse = gl.where(seen, (k + gl.log2(l)) * LN2, -float("inf"))
        gl.store(lse_ptr + first + sum_row, lse, mask=sum_row < num_rows)
    else:
        first = slot.to(gl.int64) * num_rows
        at += first * (GROUPS * 128)
        gl.store(part_acc_ptr + at, o * scale, mask=row < num_rows)
        sum_at = part_sum_ptr + (first + sum_row) * 2
        gl.store(sum_at, l, mask=sum_row < num_rows)
        gl.store(sum_at + 1, k, mask=sum_row < num_rows)
