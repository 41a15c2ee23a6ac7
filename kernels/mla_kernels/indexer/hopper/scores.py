# SPDX-License-Identifier: Apache-2.0
"""Indexer scores on Hopper: pages by TMA into a ring, from there straight into wgmma registers.

One CTA is one warpgroup. A thread of it holds, of each of its two tokens, the 32 bytes d = 32 c ..
32 c + 31 (c = lane % 4): two 16-byte shared loads, without bank conflicts under the TMA's swizzle.
The tensor core wants other columns there, but a dot product does not mind in which order d runs, so
q is laid out in the order that the keys come in. e4m3 becomes fp16, exactly, in registers.

The pages of all rows, counted on the device, are dealt out evenly to the programs.
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
)
from triton.language.extra.cuda import gdc_launch_dependents

from mla_kernels.topk.triton.keys import GROUP, ordered_key
from mla_kernels.triton_common.dequantize import TO_F16
from mla_kernels.triton_common.gluon_compat import cta_barrier, reinterpret, tma_load

PROPAGATE_NAN = gl.constexpr(tl.PropagateNan.ALL)
PAGE = gl.constexpr(64)
D = gl.constexpr(128)
# A page is 66 lines of 128 bytes: 64 keys, then 64 fp32 scales.
LINES = gl.constexpr(66)
PAGE_BYTES = gl.constexpr(66 * 128)

KEYS = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2))
SCALES = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=8, rank=2))
SCALE_VECTOR = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
QUERY = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
# Bytes of a page as the threads load them.
BYTES = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [0, 8], [0, 16], [8, 0]],
        lane_bases=[[0, 32], [0, 64], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, 128],
    )
)
QUERY_LOAD = gl.constexpr(gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0]))
TILE_LIST = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))


@gluon.jit
def add(a, b):
    return a + b


@gluon.jit
def to_f16(codes):
    """e4m3 bytes -> fp16, exactly."""
    return gl.inline_asm_elementwise(
        TO_F16, "=r,=r,r", [codes], dtype=gl.float16, is_pure=True, pack=4
    )


@gluon.jit
def shuffled(codes):
    """[N, 128] e4m3 bytes -> fp16, the columns in the order that suits BYTES: a thread's own bytes
    become its columns of the wgmma operand."""
    x = gl.reshape(to_f16(codes), [codes.shape[0], 4, 8, 2, 2])
    return gl.reshape(gl.permute(x, [0, 2, 3, 1, 4]), codes.shape)


@gluon.jit
def load_page(keys_desc, scales_desc, page, keys, scales, full, slot):
    mbarrier.expect(full.index(slot), PAGE_BYTES)
    tma_load(keys_desc, [page * LINES, 0], full.index(slot), keys.index(slot))
    tma_load(scales_desc, [page * LINES + PAGE, 0], full.index(slot), scales.index(slot))


@gluon.jit(do_not_specialize=["num_rows", "stride_weights", "stride_table"])
def hopper_scores_kernel(
    keys_desc,  # [num_blocks * 66, 128] uint8, boxes [64, 128]
    scales_desc,  # the same, boxes [2, 128]
    q_ptr,  # [T, H, 128] uint8 (e4m3)
    weights_ptr,  # [T, H] fp32
    table_ptr,  # [T, max_blocks] int32
    lengths_ptr,  # [T] int32
    scores_ptr,  # [T, 64 * max_blocks] fp32, written up to the end of each row's last page
    level1_ptr,  # [T, 8 * max_blocks] int32, likewise, or None: the top-k's keys of 8 tokens each
    num_rows,
    max_len,
    stride_q_row,
    stride_q_head,
    stride_weights,
    stride_table,
    stride_scores,
    stride_level1,
    H: gl.constexpr,
    HEADS: gl.constexpr,
    ROWS: gl.constexpr,
    STAGES: gl.constexpr,
):
    gdc_launch_dependents()
    DOTS: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, HEADS, 16]
    )
    KEY_OPERAND: gl.constexpr = gl.DotOperandLayout(0, DOTS, 2)
    TOKEN: gl.constexpr = gl.SliceLayout(1, DOTS)
    HEAD: gl.constexpr = gl.SliceLayout(0, DOTS)
    keys = gl.allocate_shared_memory(gl.uint8, [STAGES, PAGE, D], KEYS)
    scales = gl.allocate_shared_memory(gl.uint8, [STAGES, 2, D], SCALES)
    q_shared = gl.allocate_shared_memory(gl.float16, [HEADS, D], QUERY)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
    fence_async_shared()

    # This program's share of the pages of all rows, counted through.
    row_list = gl.arange(0, ROWS, TILE_LIST)
    listed = gl.load(lengths_ptr + row_list, mask=row_list < num_rows, other=0)
    listed = gl.minimum(gl.maximum(listed, 0), max_len)
    ends = gl.associative_scan((listed + PAGE - 1) // PAGE, 0, add)
    total = gl.max(ends, 0)
    share = gl.cdiv(total, gl.num_programs(0))
    begin = gl.program_id(0) * share
    end = gl.minimum(begin + share, total)

    token = gl.arange(0, PAGE, TOKEN)
    head = gl.arange(0, HEADS, HEAD)
    slot = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    while begin < end:
        row = gl.sum((ends <= begin).to(gl.int32), 0)
        row_begin = gl.max(gl.where(ends <= begin, ends, 0), 0)
        length = gl.minimum(gl.load(lengths_ptr + row), max_len)
        first = begin - row_begin
        stop = gl.minimum(end - row_begin, (length + PAGE - 1) // PAGE)
        row64 = row.to(gl.int64)
        table = table_ptr + row64 * stride_table
        ahead = slot + 0
        for i in gl.static_range(STAGES):
            if first + i < stop:
                page = gl.load(table + first + i)
                load_page(keys_desc, scales_desc, page, keys, scales, full, ahead)
                ahead = gl.where(ahead + 1 == STAGES, 0, ahead + 1)

        h = gl.arange(0, HEADS, gl.SliceLayout(1, QUERY_LOAD))
        d = gl.arange(0, D, gl.SliceLayout(0, QUERY_LOAD))
        q_at = q_ptr + row64 * stride_q_row + (h * stride_q_head)[:, None] + d[None, :]
        q_shared.store(shuffled(gl.load(q_at, mask=(h < H)[:, None], other=0)))
        weights = gl.load(weights_ptr + row64 * stride_weights + head, mask=head < H, other=0.0)
        fence_async_shared()
        cta_barrier()

        scores = scores_ptr + row64 * stride_scores + token
        page = gl.load(table + gl.minimum(first + STAGES, stop - 1))
        for n in range(first, stop):
            mbarrier.wait(full.index(slot), phase)
            codes = keys.index(slot).load(BYTES)
            scale = reinterpret(scales.index(slot), gl.float32, [PAGE], SCALE_VECTOR).load(TOKEN)
            cta_barrier()
            if n + STAGES < stop:
                load_page(keys_desc, scales_desc, page, keys, scales, full, slot)
            page = gl.load(table + gl.minimum(n + STAGES + 1, stop - 1))
            k = gl.convert_layout(shuffled(codes), KEY_OPERAND, assert_trivial=True)
            dots = gl.zeros([PAGE, HEADS], gl.float32, DOTS)
            dots = warpgroup_mma(k, q_shared.permute((1, 0)), dots, use_acc=False)
            # NaN passes through the ReLU as it does in torch.
            relu = gl.maximum(dots, 0.0, propagate_nan=PROPAGATE_NAN)
            score = gl.sum(relu * weights[None, :], 1) * scale
            at = n * PAGE
            score = gl.where(at + token < length, score, float("-inf"))
            gl.store(scores + at, score)
            if level1_ptr is not None:
                best = gl.max(gl.reshape(ordered_key(score), [PAGE // GROUP, GROUP]), 1)
                group = gl.arange(0, PAGE // GROUP, best.type.layout)
                level1 = level1_ptr + row64 * stride_level1 + n * (PAGE // GROUP) + group
                gl.store(level1, best.to(gl.int32, bitcast=True))
            wrap = slot + 1 == STAGES
            slot = gl.where(wrap, 0, slot + 1)
            phase = gl.where(wrap, phase ^ 1, phase)
        begin += stop - first
        cta_barrier()  # all have done with q
