# SPDX-License-Identifier: Apache-2.0
"""The dense MLA decode kernel: one program is one tile of query rows times one part of the plan.

A query row is a pair (new token, head): row r = s * H + h. A program walks the requests of its
part; each unbroken range of cache tiles it covers is a segment. The segment that is a whole request
writes `out` and `lse`; any other writes its fp32 (O, l, k) to the plan's workspace for the merge.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from mla_kernels.decode.plan import kernel as plan_kernel
from mla_kernels.decode.triton.segment import attend, write_segment
from mla_kernels.decode.triton.softmax import EXPONENT_FLOOR, OUTGROWN
from mla_kernels.triton_common.fp16_query import largest_number, powers_of_two, to_fp16

PLAN_TILE = tl.constexpr(plan_kernel.PLAN_TILE)


@triton.jit(
    do_not_specialize=["table_stride", "num_rows", "num_heads", "s_q"],
)
def mla_decode_kernel(
    q_ptr,  # [B, s_q, H, DV + DR]
    kv_ptr,  # [num_blocks, PAGE, row]
    kv_scale_view_ptr,  # fp8_ds_mla: the cache as fp32
    kv_rope_view_ptr,  # fp8_ds_mla: the cache as bf16
    kv_scale,  # fp8: fp32, or with LOAD_SCALE a pointer to it
    table_ptr,  # [B, max_blocks] int32
    lens_ptr,  # [B] int32
    parts_ptr,  # [parts, 8] int32: plan/kernel.py
    requests_ptr,  # [B, 4] int32: plan/kernel.py
    out_ptr,  # [B, s_q, H, DV]
    lse_ptr,  # [B, s_q, H] fp32
    part_acc_ptr,  # [slots, s_q * H, DV] fp32
    part_sum_ptr,  # [slots, s_q * H, 2] fp32: l, k
    outgrown_ptr,  # [parts, row tiles] int32, zeros: scratch of each program
    scale_log2,  # softmax scale * log2(e)
    q_stride_b,
    q_stride_s,
    q_stride_h,
    page_stride,
    table_stride,
    num_rows,  # s_q * H
    num_heads,
    s_q,
    BM: tl.constexpr,
    BN: tl.constexpr,
    DV: tl.constexpr,
    DR: tl.constexpr,
    PAGE: tl.constexpr,
    ROW: tl.constexpr,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    SCALE_OFFSET: tl.constexpr,
    ROPE_OFFSET: tl.constexpr,
    ALIGN: tl.constexpr,
    LOAD_SCALE: tl.constexpr,
    CAUSAL: tl.constexpr,
    RESCALE: tl.constexpr,
    REFERENCE: tl.constexpr,
    LAZY_BRANCH: tl.constexpr,
    ORDER: tl.constexpr,
    CHUNKED: tl.constexpr,
    FP16_DOTS: tl.constexpr,  # fp8: multiply the bytes as fp16, without their scale
    HW_FP8: tl.constexpr,
    WGMMA: tl.constexpr,
    WARPS: tl.constexpr,
    STAGES: tl.constexpr,
    CARRY: tl.constexpr,
    PREFETCH: tl.constexpr,
    PDL: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    row_ok = row < num_rows
    DTYPE: tl.constexpr = tl.float16 if FP16_DOTS else q_ptr.dtype.element_ty
    dv = tl.arange(0, DV)
    dr = tl.arange(0, DR)
    new_token = row // num_heads
    head = (row % num_heads).to(tl.int64)
    q_row = new_token.to(tl.int64) * q_stride_s + head * q_stride_h
    v_scale = 1.0
    if FORMAT == "fp8":
        cache_scale = tl.load(kv_scale) if LOAD_SCALE else kv_scale
        if FP16_DOTS:  # the bytes are multiplied as they are
            v_scale = cache_scale
            scale_log2 = scale_log2 * v_scale
    else:
        cache_scale = 1.0

    flag = outgrown_ptr + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    part = parts_ptr + tl.program_id(1) * 8
    request = tl.load(part + 0)
    tile = tl.load(part + 1) * (PLAN_TILE // BN)
    last_request = tl.load(part + 2)
    last_end = tl.load(part + 3) * (PLAN_TILE // BN)
    split = tl.load(part + 4)
    while request <= last_request:
        length = tl.load(lens_ptr + request)
        end = (length + BN - 1) // BN
        if request == last_request:
            end = tl.minimum(last_end, end)
        slot = tl.load(requests_ptr + request * 4 + 0)
        splits = tl.load(requests_ptr + request * 4 + 1)
        if CHUNKED:
            chunk = tl.load(requests_ptr + request * 4 + 2) * (PLAN_TILE // BN)
        else:
            chunk = end
        # Keys that row r may see: all of the request's, or with CAUSAL those up to its own token.
        limit = length
        if CAUSAL:
            limit = length - s_q + 1 + new_token
        table = table_ptr + request.to(tl.int64) * table_stride
        q_at = q_ptr + request.to(tl.int64) * q_stride_b + q_row
        # REFERENCE "first": turn 0 takes k from the segment's first tile. If a row outgrew it,
        # turn 1 finds the maxima and turn 2 uses them.
        turn = 0
        k = tl.full([BM], EXPONENT_FLOOR, tl.float32)
        while tile < end:
            stop = tl.minimum(tile + chunk, end)
            q = tl.load(q_at[:, None] + dv[None, :], mask=row_ok[:, None], other=0.0)
            q_rope = tl.load(q_at[:, None] + (DV + dr)[None, :], mask=row_ok[:, None], other=0.0)
            row_scale = scale_log2
            if FP16_DOTS:
                down, up = powers_of_two(tl.maximum(largest_number(q), largest_number(q_rope)))
                q = to_fp16(q, down)
                q_rope = to_fp16(q_rope, down)
                row_scale = scale_log2 * up
            refresh = tile
            if turn == 0:
                refresh = tile + 1
                k = tl.full([BM], EXPONENT_FLOOR, tl.float32)
            if turn == 1:
                refresh = stop
            acc, k, l = attend(
                q, q_rope, q_ptr, row_scale, kv_ptr, kv_scale_view_ptr, kv_rope_view_ptr, table,
                page_stride, cache_scale, tile, stop, length, limit, k, refresh, num_heads,
                BM, BN, DV, DR, PAGE, ROW, FORMAT, GROUP, SCALE_OFFSET, ROPE_OFFSET, ALIGN,
                CAUSAL, RESCALE, REFERENCE,
                LAZY_BRANCH, ORDER, DTYPE, FP16_DOTS, HW_FP8, WGMMA, WARPS, STAGES, CARRY, PREFETCH,
                INTERPRET,
            )  # fmt: skip
            again = False
            if REFERENCE == "first":
                # Through memory: a reduction here makes the compiler spill in the loop above.
                tl.store(flag + tl.zeros([BM], tl.int32), 1, mask=(l >= OUTGROWN) & (turn == 0))
                tl.debug_barrier()
                again = (turn < 2) & (tl.load(flag, volatile=True) != 0)
            if again:
                turn += 1
                if turn == 2:
                    tl.debug_barrier()  # every thread has read the flag
                    tl.store(flag, 0)
            else:
                if PDL:  # noqa: SIM102 (known to the compiler, the other is not)
                    if request == last_request:
                        gdc_launch_dependents()
                write_segment(
                    acc, k, l, v_scale, out_ptr, lse_ptr, part_acc_ptr, part_sum_ptr,
                    request, splits, slot + split, row, row_ok, num_rows,
                    DV, DTYPE, RESCALE, ORDER,
                )  # fmt: skip
                split += 1
                tile = stop
                turn = 0
        request += 1
        tile = 0
        split = 0
