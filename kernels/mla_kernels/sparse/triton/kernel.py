# SPDX-License-Identifier: Apache-2.0
"""The sparse MLA kernel: one program is one token, a tile of its heads and a range of its slots.

A token that is one range is written to `out` and `lse`; of more ranges each leaves its fp32
(O, l, k) for the merge.
"""

import triton
import triton.language as tl

from mla_kernels.decode.triton.softmax import EXPONENT_FLOOR, OUTGROWN
from mla_kernels.sparse.triton.attend import attend_slots
from mla_kernels.sparse.triton.gather import appended, last_slot
from mla_kernels.sparse.triton.results import write_max_logits, write_program
from mla_kernels.triton_common.fp16_query import largest_number, powers_of_two, to_fp16

SCAN = tl.constexpr(1024)


@triton.jit
def load_query(
    q_at,
    row_ok,
    row_scale,
    DV: tl.constexpr,
    DR: tl.constexpr,
    PARTS: tl.constexpr,
    FP16_DOTS: tl.constexpr,
):
    """(q in PARTS, q_rope, scale). FP16_DOTS: as triton_common/fp16_query.py has them."""
    mask = row_ok[:, None]
    WIDTH: tl.constexpr = DV // PARTS
    q_rope = tl.load(q_at + (DV + tl.arange(0, DR)[None, :]), mask=mask, other=0.0)
    q = ()
    for j in tl.static_range(PARTS):
        column = j * WIDTH + tl.arange(0, WIDTH)[None, :]
        q = appended(q, tl.load(q_at + column, mask=mask, other=0.0))
    if FP16_DOTS:
        top = largest_number(q_rope)
        for j in tl.static_range(PARTS):
            top = tl.maximum(top, largest_number(q[j]))
        down, up = powers_of_two(top)
        row_scale = row_scale * up
        halves = ()
        for j in tl.static_range(PARTS):
            halves = appended(halves, to_fp16(q[j], down))
        q = halves
        q_rope = to_fp16(q_rope, down)
    return q, q_rope, row_scale


@triton.jit(do_not_specialize=["num_slots", "K", "num_heads", "span"])
def mla_sparse_kernel(
    q_ptr,  # [T, H, DV + DR]
    kv_ptr,  # [num_blocks, PAGE, row]
    kv_scale_view_ptr,  # fp8_ds_mla: the cache as fp32
    kv_rope_view_ptr,  # fp8_ds_mla: the cache as bf16
    kv_scale,  # fp8: fp32, or with LOAD_SCALE a pointer to it
    slots_ptr,  # [T, K] int32
    lengths_ptr,  # [T] int32, with HAS_LENGTHS
    sink_ptr,  # [H] fp32, with HAS_SINK
    out_ptr,  # [T, H, DV]
    lse_ptr,  # [T, H] fp32
    max_logits_ptr,  # [T, H] fp32, with MAX_LOGITS; -inf before, with SPLIT
    part_acc_ptr,  # [T, splits, H, DV] fp32, with SPLIT
    part_sum_ptr,  # [T, splits, H, 2] fp32: l, k
    scale_log2,  # softmax scale * log2(e)
    q_stride_t,
    q_stride_h,
    page_stride,
    slots_stride,
    num_slots,  # of the cache
    K,
    num_heads,
    span,  # slots of a program, a multiple of BN
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
    HAS_LENGTHS: tl.constexpr,
    HAS_SINK: tl.constexpr,
    SPLIT: tl.constexpr,
    PARTS: tl.constexpr,
    REFERENCE: tl.constexpr,
    FP16_DOTS: tl.constexpr,
    HW_FP8: tl.constexpr,
    WGMMA: tl.constexpr,
    STAGES: tl.constexpr,
    MAX_LOGITS: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    row_tiles = tl.cdiv(num_heads, BM)
    token = (tl.program_id(0) // row_tiles).to(tl.int64)
    row = (tl.program_id(0) % row_tiles) * BM + tl.arange(0, BM)
    row_ok = row < num_heads
    DTYPE: tl.constexpr = tl.float16 if FP16_DOTS else q_ptr.dtype.element_ty
    v_scale = 1.0
    cache_scale = 1.0
    row_scale = scale_log2
    if FORMAT == "fp8":
        cache_scale = tl.load(kv_scale) if LOAD_SCALE else kv_scale
        if FP16_DOTS:  # the bytes are multiplied as they are
            v_scale = cache_scale
            row_scale = scale_log2 * v_scale

    limit = K
    if HAS_LENGTHS:
        limit = tl.minimum(tl.load(lengths_ptr + token), K)
    slots = slots_ptr + token * slots_stride
    start = tl.program_id(1) * span
    stop = last_slot(slots, start, tl.minimum(start + span, limit), num_slots, SCAN)
    # Of the results: the first of this program's row tile, and its rows.
    result = token * num_heads
    if SPLIT:
        result = (token * tl.num_programs(1) + tl.program_id(1)) * num_heads
    # A flag for REFERENCE "first" lies where the first row's result will.
    flag = lse_ptr + (result + (tl.program_id(0) % row_tiles) * BM)
    if SPLIT:
        flag = part_sum_ptr + (result + (tl.program_id(0) % row_tiles) * BM) * 2
    q_at = (q_ptr + token * q_stride_t + row.to(tl.int64) * q_stride_h)[:, None]
    k = tl.full([BM], EXPONENT_FLOOR, tl.float32)
    if REFERENCE == "first":
        # Turn 0 takes k from the first tile. If a row outgrew it, turn 1 finds the maxima and turn
        # 2 uses them.
        tl.store(flag, 0.0)
        turn = 0
        while turn < 3:
            q, q_rope, used_scale = load_query(q_at, row_ok, row_scale, DV, DR, PARTS, FP16_DOTS)
            refresh = start
            if turn == 0:
                refresh = start + BN
            if turn == 1:
                refresh = stop
            acc, k, l, top = attend_slots(
                q, q_rope, q_ptr, used_scale, kv_ptr, kv_scale_view_ptr, kv_rope_view_ptr, slots,
                page_stride, num_slots, cache_scale, start, stop, k, refresh, num_heads,
                BM, BN, DV, DR, PAGE, ROW, FORMAT, GROUP, SCALE_OFFSET, ROPE_OFFSET, ALIGN,
                PARTS, REFERENCE, DTYPE, FP16_DOTS, HW_FP8, WGMMA, STAGES, MAX_LOGITS, INTERPRET,
            )  # fmt: skip
            # Through memory: a reduction here makes the compiler spill in the loop above.
            tl.debug_barrier()
            tl.store(flag + tl.zeros([BM], tl.int32), 1.0, mask=(l >= OUTGROWN) & (turn == 0))
            tl.debug_barrier()
            if (turn < 2) & (tl.load(flag, volatile=True) != 0.0):
                turn += 1
            else:
                tl.debug_barrier()  # every thread has read the flag
                write_program(
                    acc, k, l, 1.0, out_ptr, lse_ptr, sink_ptr, part_acc_ptr, part_sum_ptr,
                    result, row, row_ok, DV, PARTS, HAS_SINK, SPLIT,
                )  # fmt: skip
                if MAX_LOGITS:
                    at = max_logits_ptr + (token * num_heads + row)
                    write_max_logits(top, used_scale, at, row_ok, SPLIT)
                turn = 3
    else:
        q, q_rope, used_scale = load_query(q_at, row_ok, row_scale, DV, DR, PARTS, FP16_DOTS)
        acc, k, l, top = attend_slots(
            q, q_rope, q_ptr, used_scale, kv_ptr, kv_scale_view_ptr, kv_rope_view_ptr, slots,
            page_stride, num_slots, cache_scale, start, stop, k, start, num_heads,
            BM, BN, DV, DR, PAGE, ROW, FORMAT, GROUP, SCALE_OFFSET, ROPE_OFFSET, ALIGN,
            PARTS, REFERENCE, DTYPE, FP16_DOTS, HW_FP8, WGMMA, STAGES, MAX_LOGITS, INTERPRET,
        )  # fmt: skip
        write_program(
            acc, k, l, v_scale, out_ptr, lse_ptr, sink_ptr, part_acc_ptr, part_sum_ptr,
            result, row, row_ok, DV, PARTS, HAS_SINK, SPLIT,
        )  # fmt: skip
        if MAX_LOGITS:
            at = max_logits_ptr + (token * num_heads + row)
            write_max_logits(top, used_scale, at, row_ok, SPLIT)
