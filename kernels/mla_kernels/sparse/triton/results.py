# SPDX-License-Identifier: Apache-2.0
"""Writing a token's result, and merging the partials of one that several programs share."""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from mla_kernels import numerics
from mla_kernels.arch import Arch
from mla_kernels.decode.hopper.support import BLOCK
from mla_kernels.decode.merge.launcher import MergeTile
from mla_kernels.decode.triton.softmax import pow2_int
from mla_kernels.sparse.triton.tiles import Split
from mla_kernels.triton_common.launch import launch
from mla_kernels.triton_common.rounding import round_to
from mla_kernels.triton_common.runtime import INTERPRET

EXPONENT_FLOOR = tl.constexpr(numerics.EXPONENT_FLOOR)
LN2 = tl.constexpr(numerics.LN2)
LOG2E = tl.constexpr(numerics.LOG2E)

# fp32 numbers that a program of 4 warps holds in flight: 32 registers a thread.
IN_FLIGHT = 4096


@triton.jit
def one_over_sum(l, k, sink_ptr, head, ok, HAS_SINK: tl.constexpr):
    """What O is multiplied by: 1 / l, 0 for no key; the sink is one more term of the sum."""
    if HAS_SINK:
        sink = tl.load(sink_ptr + head, mask=ok, other=0.0)
        return tl.where(l != 0.0, 1.0 / (l + tl.exp2(sink * LOG2E - k)), 0.0)
    else:
        return tl.where(l != 0.0, 1.0 / l, 0.0)


@triton.jit
def log_sum(l, k):
    """The natural log-sum-exp, without the sink."""
    return tl.where(l != 0.0, (k + tl.log2(l)) * LN2, -float("inf"))


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
    PARTS: tl.constexpr,
    HAS_SINK: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """What one program found, at the rows first + row of the results or of the partials.

    acc is PARTS times [rows, DV // PARTS].
    """
    at = first + row
    WIDTH: tl.constexpr = DV // PARTS
    if SPLIT:
        tl.store(part_sum_ptr + at * 2, l, mask=ok)
        tl.store(part_sum_ptr + at * 2 + 1, k, mask=ok)
    else:
        v_scale = one_over_sum(l, k, sink_ptr, row, ok, HAS_SINK)[:, None] * v_scale
        tl.store(lse_ptr + at, log_sum(l, k), mask=ok)
    for j in tl.static_range(PARTS):
        offset = at[:, None] * DV + (j * WIDTH + tl.arange(0, WIDTH)[None, :])
        o = acc[j] * v_scale
        if SPLIT:
            tl.store(part_acc_ptr + offset, o, mask=ok[:, None])
        else:
            o = round_to(o, out_ptr.dtype.element_ty)
            tl.store(out_ptr + offset, o, mask=ok[:, None])


@triton.jit
def write_max_logits(top, row_scale, at, ok, SPLIT: tl.constexpr):
    """The largest scores q . k, scaled; over the ranges of a token whichever is largest."""
    logit = top * (row_scale * LN2)
    if SPLIT:
        tl.atomic_max(at, logit, mask=ok, sem="relaxed")
    else:
        tl.store(at, logit, mask=ok)


@triton.jit(do_not_specialize=["num_heads", "splits", "tiles", "share"])
def mla_sparse_merge_kernel(
    part_acc_ptr,  # [T, splits, H, DV] fp32
    part_sum_ptr,  # [T, splits, H, 2] fp32: l, k
    sink_ptr,  # [H] fp32, with HAS_SINK
    out_ptr,  # [T, H, DV]
    lse_ptr,  # [T, H] fp32
    num_heads,
    splits,
    tiles,  # of a token, with SHARES
    share,  # tiles of a range
    DV: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    SPLITS: tl.constexpr,  # at least splits
    HAS_SINK: tl.constexpr,
    SHARES: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: ROWS heads and COLS columns of one token. With SHARES (tiles.Split) a token has
    as many partials as its tiles are in ranges.

    k is an integer, so the factors 2^(k_s - k) are exact (decode/merge/kernel.py).
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    col = tl.program_id(2) * COLS + tl.arange(0, COLS)
    ok = head < num_heads
    if PDL:
        gdc_wait()
    s = tl.arange(0, SPLITS)
    at = (token * splits + s)[None, :] * num_heads + head[:, None]
    used = splits
    if SHARES:
        first = tl.program_id(0) * tiles
        used = (first + tiles - 1) // share - first // share + 1
    ok_s = ok[:, None] & (s < used)[None, :]
    k_s = tl.load(part_sum_ptr + at * 2 + 1, mask=ok_s, other=EXPONENT_FLOOR)
    l_s = tl.load(part_sum_ptr + at * 2, mask=ok_s, other=0.0)
    o_at = part_acc_ptr + at[:, :, None] * DV + col[None, None, :]
    o_s = tl.load(o_at, mask=ok_s[:, :, None], other=0.0)
    k = tl.max(k_s, 1)
    factor = pow2_int(k_s - k[:, None])
    o = tl.sum(o_s * factor[:, :, None], 1)
    l = tl.sum(l_s * factor, 1)
    o *= one_over_sum(l, k, sink_ptr, head, ok, HAS_SINK)[:, None]
    at = token * num_heads + head
    out_at = out_ptr + at[:, None] * DV + col[None, :]
    tl.store(out_at, round_to(o, out_ptr.dtype.element_ty), mask=ok[:, None])
    if tl.program_id(2) == 0:
        tl.store(lse_ptr + at, log_sum(l, k), mask=ok)


def merge_tile(splits: int, kv_lora_rank: int) -> MergeTile:
    """All splits in flight at once; narrow columns for many of them. Up to 64 splits two rows or
    more: of one, the compiler passes the factors of its splits through shared memory one by one."""
    at_once = triton.next_power_of_2(splits)
    cols = min(kv_lora_rank, max(32, IN_FLIGHT // 2 // at_once))
    return MergeTile(rows=max(1, IN_FLIGHT // at_once // cols), cols=cols, splits=at_once)


def launch_merge(
    acc: torch.Tensor,
    sums: torch.Tensor,
    sink: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    split: Split,
    K: int,
    arch: Arch,
) -> None:
    """out and lse of all tokens, of K slots each, from their partials.

    few_rows/kernel.py asks for it when its last values are multiplied. Earlier is slower, and after
    the Hopper kernel it is fastest not to ask (benchmarks/versions/sparse.md, row 21).
    """
    T, H, DV = out.shape
    tile = merge_tile(split.splits, DV)
    pdl = arch.programmatic_launch and not INTERPRET
    launch(
        mla_sparse_merge_kernel,
        (T, triton.cdiv(H, tile.rows), DV // tile.cols),
        acc,
        sums,
        out if sink is None else sink,
        out,
        lse,
        H,
        split.splits,
        triton.cdiv(K, BLOCK),
        split.span // BLOCK,
        DV=DV,
        ROWS=tile.rows,
        COLS=tile.cols,
        SPLITS=tile.splits,
        HAS_SINK=sink is not None,
        SHARES=split.shares,
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )
