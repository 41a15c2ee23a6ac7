# SPDX-License-Identifier: Apache-2.0
"""Writing a token's result, and merging the partials of one that several programs share."""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from mla_kernels import numerics
from mla_kernels.arch import Arch
from mla_kernels.decode.triton.merge import MergeTile
from mla_kernels.decode.triton.softmax import pow2_int
from mla_kernels.triton_common.rounding import round_to
from mla_kernels.triton_common.runtime import INTERPRET

EXPONENT_FLOOR = tl.constexpr(numerics.EXPONENT_FLOOR)
LN2 = tl.constexpr(numerics.LN2)
LOG2_E = tl.constexpr(1.0 / numerics.LN2)

# fp32 numbers that a program of 4 warps holds in flight: 32 registers a thread.
IN_FLIGHT = 4096


@triton.jit
def write_rows(
    o,
    l,
    k,
    out_ptr,
    lse_ptr,
    sink_ptr,
    at,
    head,
    col,
    ok,
    with_lse,
    DV: tl.constexpr,
    HAS_SINK: tl.constexpr,
):
    """O and l, relative to 2^k, of the rows `at` to columns `col` of out, and to lse.

    The sink is one more term of the denominator; lse is without it.
    """
    seen = l > 0.0
    denominator = l
    if HAS_SINK:
        sink = tl.load(sink_ptr + head, mask=ok, other=0.0)
        denominator += tl.exp2(sink * LOG2_E - k)
    o *= tl.where(seen, 1.0 / denominator, 0.0)[:, None]
    out_at = out_ptr + at[:, None] * DV + col[None, :]
    tl.store(out_at, round_to(o, out_ptr.dtype.element_ty), mask=ok[:, None])
    if with_lse:
        lse = tl.where(seen, (k + tl.log2(l)) * LN2, -float("inf"))
        tl.store(lse_ptr + at, lse, mask=ok)


@triton.jit
def write_program(
    acc,
    k,
    l,
    v_scale,
    out_ptr,
    lse_ptr,
    sink_ptr,
    part_acc_ptr,
    part_sum_ptr,
    first,
    row,
    ok,
    DV: tl.constexpr,
    HAS_SINK: tl.constexpr,
    SPLIT: tl.constexpr,
    ORDER: tl.constexpr,
):
    """What one program found, at the rows first + row of the results or of the partials."""
    if ORDER == "tokens":
        o = tl.trans(acc) * v_scale
    else:
        o = acc * v_scale
    at = first + row
    col = tl.arange(0, DV)
    if SPLIT:
        tl.store(part_acc_ptr + at[:, None] * DV + col[None, :], o, mask=ok[:, None])
        tl.store(part_sum_ptr + at * 2, l, mask=ok)
        tl.store(part_sum_ptr + at * 2 + 1, k, mask=ok)
    else:
        write_rows(o, l, k, out_ptr, lse_ptr, sink_ptr, at, row, col, ok, True, DV, HAS_SINK)


@triton.jit(do_not_specialize=["num_heads", "splits"])
def mla_sparse_merge_kernel(
    part_acc_ptr,  # [T, splits, H, DV] fp32
    part_sum_ptr,  # [T, splits, H, 2] fp32: l, k
    sink_ptr,  # [H] fp32, with HAS_SINK
    out_ptr,  # [T, H, DV]
    lse_ptr,  # [T, H] fp32
    num_heads,
    splits,
    DV: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    SPLITS: tl.constexpr,  # at least splits
    HAS_SINK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: ROWS heads and COLS columns of one token.

    k is an integer, so the factors 2^(k_s - k) are exact (decode/triton/merge.py).
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    col = tl.program_id(2) * COLS + tl.arange(0, COLS)
    ok = head < num_heads
    if PDL:
        gdc_wait()
    s = tl.arange(0, SPLITS)
    at = (token * splits + s)[None, :] * num_heads + head[:, None]
    ok_s = ok[:, None] & (s < splits)[None, :]
    k_s = tl.load(part_sum_ptr + at * 2 + 1, mask=ok_s, other=EXPONENT_FLOOR)
    l_s = tl.load(part_sum_ptr + at * 2, mask=ok_s, other=0.0)
    o_at = part_acc_ptr + at[:, :, None] * DV + col[None, None, :]
    o_s = tl.load(o_at, mask=ok_s[:, :, None], other=0.0)
    k = tl.max(k_s, 1)
    factor = pow2_int(k_s - k[:, None])
    o = tl.sum(o_s * factor[:, :, None], 1)
    l = tl.sum(l_s * factor, 1)
    write_rows(
        o, l, k, out_ptr, lse_ptr, sink_ptr, token * num_heads + head, head, col, ok,
        tl.program_id(2) == 0, DV, HAS_SINK,
    )  # fmt: skip


def merge_tile(splits: int, kv_lora_rank: int) -> MergeTile:
    """All splits in flight at once; narrow columns for many of them."""
    at_once = triton.next_power_of_2(splits)
    cols = min(kv_lora_rank, max(32, IN_FLIGHT // at_once))
    return MergeTile(rows=max(1, IN_FLIGHT // at_once // cols), cols=cols, splits=at_once)


def launch_merge(
    acc: torch.Tensor,
    sums: torch.Tensor,
    sink: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    splits: int,
    arch: Arch,
) -> None:
    """out and lse of all tokens from their partials, `splits` a token."""
    T, H, DV = out.shape
    tile = merge_tile(splits, DV)
    pdl = arch.programmatic_launch and not INTERPRET
    mla_sparse_merge_kernel[(T, triton.cdiv(H, tile.rows), DV // tile.cols)](
        acc,
        sums,
        out if sink is None else sink,
        out,
        lse,
        H,
        splits,
        DV=DV,
        ROWS=tile.rows,
        COLS=tile.cols,
        SPLITS=tile.splits,
        HAS_SINK=sink is not None,
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )
