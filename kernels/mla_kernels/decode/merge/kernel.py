# SPDX-License-Identifier: Apache-2.0
"""Merging the fp32 partials (O, l, k) of split requests; requests of length 0 get zeros and -inf.

    k* = max k_s ;  out = sum_s O_s 2^(k_s - k*) / sum_s l_s 2^(k_s - k*)

With the integer k of pow2 every factor is exact, so only the order of the fp32 additions matters.
ORDERED adds the splits one after the other, whatever the tile; else the order is the tile's, which
keeps more splits in flight.

On sm_90 and newer the merge is launched while the decode kernel ends: programs ask for that when
the last of their scores are made. Asked for at their start it was slower than not at all.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from mla_kernels import numerics
from mla_kernels.triton_common.rounding import round_to

EXPONENT_FLOOR = tl.constexpr(numerics.EXPONENT_FLOOR)
LN2 = tl.constexpr(numerics.LN2)


@triton.jit(do_not_specialize=["num_rows"])
def merge_kernel(
    part_acc_ptr,  # [slots, rows, DV] fp32
    part_sum_ptr,  # [slots, rows, 2] fp32: l, k
    requests_ptr,  # [B, 4] int32: plan/kernel.py
    out_ptr,  # [B, rows, DV]
    lse_ptr,  # [B, rows] fp32
    num_rows,
    DV: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    SPLITS: tl.constexpr,  # loaded at a time
    ORDERED: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: ROWS rows and COLS columns of one request."""
    request = tl.program_id(2).to(tl.int64)
    slot = tl.load(requests_ptr + request * 4 + 0).to(tl.int64)
    splits = tl.load(requests_ptr + request * 4 + 1)
    if splits != 1:
        row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        col = tl.program_id(1) * COLS + tl.arange(0, COLS)
        row_ok = row < num_rows
        s = tl.arange(0, SPLITS)
        if PDL:  # the plan was there before; the partials are the decode kernel's
            gdc_wait()

        # Reductions stay out of the loops: Triton 3.6 fails on them ("OptimizeThreadLocality").
        at = (slot + s)[None, :] * num_rows + row[:, None]
        ok = row_ok[:, None] & (s < splits)[None, :]
        k_first = tl.load(part_sum_ptr + at * 2 + 1, mask=ok, other=EXPONENT_FLOOR)
        if not ORDERED:  # asked for before the maximum is known
            l_first = tl.load(part_sum_ptr + at * 2, mask=ok, other=0.0)
            o_at = part_acc_ptr + at[:, :, None] * DV + col[None, None, :]
            o_first = tl.load(o_at, mask=ok[:, :, None], other=0.0)
        k_seen = k_first
        for s0 in range(SPLITS, splits, SPLITS):
            at = (slot + s0 + s)[None, :] * num_rows + row[:, None]
            ok = row_ok[:, None] & (s0 + s < splits)[None, :]
            k_s = tl.load(part_sum_ptr + at * 2 + 1, mask=ok, other=EXPONENT_FLOOR)
            k_seen = tl.maximum(k_seen, k_s)
        k_max = tl.max(k_seen, 1)

        if ORDERED:
            acc = tl.zeros([ROWS, COLS], tl.float32)
            l = tl.zeros([ROWS], tl.float32)
            for s0 in range(0, splits, SPLITS):
                for i in tl.static_range(SPLITS):
                    at_i = (slot + s0 + i) * num_rows + row
                    ok_i = row_ok & (s0 + i < splits)
                    o_at = part_acc_ptr + at_i[:, None] * DV + col[None, :]
                    o_s = tl.load(o_at, mask=ok_i[:, None], other=0.0)
                    l_s = tl.load(part_sum_ptr + at_i * 2, mask=ok_i, other=0.0)
                    k_i = tl.load(part_sum_ptr + at_i * 2 + 1, mask=ok_i, other=EXPONENT_FLOOR)
                    factor = tl.exp2(k_i - k_max)
                    acc += o_s * factor[:, None]
                    l += l_s * factor
        else:
            factor = tl.exp2(k_first - k_max[:, None])
            acc = o_first * factor[:, :, None]
            l = l_first * factor
            for s0 in range(SPLITS, splits, SPLITS):
                at = (slot + s0 + s)[None, :] * num_rows + row[:, None]
                ok = row_ok[:, None] & (s0 + s < splits)[None, :]
                o_at = part_acc_ptr + at[:, :, None] * DV + col[None, None, :]
                o_s = tl.load(o_at, mask=ok[:, :, None], other=0.0)
                l_s = tl.load(part_sum_ptr + at * 2, mask=ok, other=0.0)
                k_s = tl.load(part_sum_ptr + at * 2 + 1, mask=ok, other=EXPONENT_FLOOR)
                factor = tl.exp2(k_s - k_max[:, None])
                acc += o_s * factor[:, :, None]
                l += l_s * factor
            acc = tl.sum(acc, 1)
            l = tl.sum(l, 1)

        seen = l != 0.0  # NaN too
        acc = acc * tl.where(seen, 1.0 / l, 0.0)[:, None]
        out_row = request * num_rows + row
        out_at = out_ptr + out_row[:, None] * DV + col[None, :]
        tl.store(out_at, round_to(acc, out_ptr.dtype.element_ty), mask=row_ok[:, None])
        if tl.program_id(1) == 0:
            lse = tl.where(seen, (k_max + tl.log2(l)) * LN2, -float("inf"))
            tl.store(lse_ptr + out_row, lse, mask=row_ok)
    elif PDL:  # noqa: SIM102 (known to the compiler, the other is not)
        # What comes after the merge must not run before the decode kernel has ended, even if there
        # is nothing to merge: some program has to wait.
        if tl.program_id(0) + tl.program_id(1) + tl.program_id(2) == 0:
            gdc_wait()
