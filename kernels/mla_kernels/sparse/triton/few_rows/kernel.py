# SPDX-License-Identifier: Apache-2.0
"""Sparse MLA of fp8_ds_mla rows for few heads, on mma.sync with e4m3 conversion (sm_89 and newer).

A program is one token, a tile of its heads and a range of its slots, as in sparse/triton/kernel.py.
Its ring of tiles is filled by slot (gather.py); what is done with a tile is in step.py.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.language.extra.cuda import gdc_launch_dependents

from mla_kernels import numerics
from mla_kernels.decode.triton.few_rows.query import load_latent, load_rope, query_operands
from mla_kernels.sparse.triton.few_rows.gather import (
    Rows,
    gather_tile,
    last_slot,
    latent_copy,
    load_slots,
)
from mla_kernels.sparse.triton.few_rows.results import write_program
from mla_kernels.sparse.triton.few_rows.step import (
    add_values,
    allocate_scratch,
    load_scores,
    mma_layout,
    partial_layout,
    prepare_scales,
    softmax,
    store_scores,
    sum_in_threads,
    swizzled,
)

EXPONENT_FLOOR = gl.constexpr(numerics.EXPONENT_FLOOR)


@gluon.jit(
    do_not_specialize=["slots_stride", "page_step", "num_slots", "K", "num_heads", "span"],
)
def few_rows_sparse_kernel(
    q_ptr,  # latent part [T, H, DV] bf16
    q_rope_ptr,  # rope part [T, H, DR] bf16
    kv_ptr,  # [num_blocks, PAGE, row], 16-bit units
    scale_ptr,  # the cache as fp32
    slots_ptr,  # [T, K] int32
    lengths_ptr,  # [T] int32, with HAS_LENGTHS
    sink_ptr,  # [H] fp32, with HAS_SINK
    out_ptr,  # [T, H, DV] bf16
    lse_ptr,  # [T, H] fp32
    part_acc_ptr,  # [T, splits, H, DV] fp32, with SPLIT
    part_sum_ptr,  # [T, splits, H, 2] fp32: l, k
    scale_log2,  # softmax scale * log2(e)
    q_stride_t,
    q_stride_h,
    q_rope_stride_t,
    q_rope_stride_h,
    page_step,  # a page's stride in 16 bytes
    slots_stride,
    num_slots,  # of the cache
    K,
    num_heads,
    span,  # slots of a program, a multiple of BN
    BM: gl.constexpr,
    BN: gl.constexpr,
    DV: gl.constexpr,
    DR: gl.constexpr,
    PAGE: gl.constexpr,
    ROW: gl.constexpr,  # a row's stride in 16-bit units
    SCALE_OFFSET: gl.constexpr,  # in fp32
    ROPE_OFFSET: gl.constexpr,  # in 16-bit units
    HAS_LENGTHS: gl.constexpr,
    HAS_SINK: gl.constexpr,
    SPLIT: gl.constexpr,
    PDL: gl.constexpr,
    WARPS: gl.constexpr,
    STAGES: gl.constexpr,
):
    GROUPS: gl.constexpr = DV // 128
    UNITS: gl.constexpr = 64  # of a group
    MMA: gl.constexpr = mma_layout(GROUPS, WARPS)
    SCORES: gl.constexpr = gl.SliceLayout(0, partial_layout(GROUPS, BN, WARPS))
    COPY_ROW: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, latent_copy(WARPS)))
    LATENT: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [2, 1, 0])
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    VECTOR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    latent = gl.allocate_shared_memory(kv_ptr.dtype.element_ty, [STAGES, GROUPS, BN, UNITS], LATENT)
    rope = gl.allocate_shared_memory(kv_ptr.dtype.element_ty, [STAGES, BN, DR], swizzled(DR))
    scales = gl.allocate_shared_memory(gl.float32, [STAGES, BN, GROUPS], PLAIN)
    grid = gl.allocate_shared_memory(gl.float32, [STAGES, BN], VECTOR)
    scratch = allocate_scratch(GROUPS, BM, BN, DR, q_ptr.dtype.element_ty)

    row_tiles = (num_heads + BM - 1) // BM
    token = (gl.program_id(0) // row_tiles).to(gl.int64)
    first_head = (gl.program_id(0) % row_tiles) * BM
    slots = slots_ptr + token * slots_stride
    start = gl.program_id(1) * span
    limit = K
    if HAS_LENGTHS:
        limit = gl.minimum(gl.load(lengths_ptr + token), K)
    stop = gl.maximum(gl.minimum(start + span, limit), start)
    # All that a program waits for at first is asked for at once.
    rows = Rows(kv_ptr, scale_ptr, slots, start, stop, num_slots, page_step, PAGE, ROW)
    slot = load_slots(rows, 0, BN, COPY_ROW)
    # Heads may be further apart than 32 bits reach: [H, T, DV] is a layer's own order.
    q = load_latent(
        q_ptr + token * q_stride_t, first_head, 0, gl.to_tensor(q_stride_h).to(gl.int64),
        num_heads, num_heads, GROUPS, BM, WARPS,
    )  # fmt: skip
    q_rope = load_rope(
        q_rope_ptr + token * q_rope_stride_t, first_head, 0,
        gl.to_tensor(q_rope_stride_h).to(gl.int64), num_heads, num_heads, 0, BM, DR, WARPS,
    )  # fmt: skip
    stop = last_slot(rows, WARPS)
    rows = Rows(kv_ptr, scale_ptr, slots, start, stop, num_slots, page_step, PAGE, ROW)
    # At least one, if only of no rows.
    tiles = gl.maximum((stop - start + BN - 1) // BN, 1)
    for depth in gl.static_range(STAGES - 1):
        gather_tile(
            rows, slot, latent.index(depth), rope.index(depth), scales.index(depth),
            grid.index(depth), SCALE_OFFSET, ROPE_OFFSET, WARPS,
        )  # fmt: skip
        async_copy.commit_group()
        slot = load_slots(rows, depth + 1, BN, COPY_ROW)
    # The ring's last slot is still empty: q passes through it.
    stage = latent.index(STAGES - 1).slice(0, BM, dim=1)
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    q_a, q_b, up = query_operands(q, q_rope, stage, scratch.q_rope, LEFT, "fp8_ds_mla")

    k = gl.full([BM], EXPONENT_FLOOR, gl.float32, gl.SliceLayout(1, SCORES))
    weight = sum_in_threads(gl.full([BM, BN], 0.0, gl.float32, SCORES))
    o_a = gl.full([GROUPS, BM, UNITS], 0.0, gl.float32, MMA)
    o_b = o_a
    now = gl.to_tensor(0)
    fill = gl.to_tensor(STAGES - 1)
    for i in range(tiles):
        async_copy.wait_group(STAGES - 2)
        if i + STAGES - 1 < tiles:
            gather_tile(
                rows, slot, latent.index(fill), rope.index(fill), scales.index(fill),
                grid.index(fill), SCALE_OFFSET, ROPE_OFFSET, WARPS,
            )  # fmt: skip
        async_copy.commit_group()
        slot = load_slots(rows, i + STAGES, BN, COPY_ROW)
        prepare_scales(scratch, scales.index(now), up, WARPS)
        store_scores(scratch, q_a, q_b, latent.index(now), rope.index(now), WARPS)
        qk = load_scores(scratch, WARPS)
        k, weight = softmax(scratch, qk, grid.index(now), scale_log2, k, weight)
        o_a, o_b = add_values(scratch, latent.index(now), o_a, o_b, WARPS)
        now = gl.where(now + 1 == STAGES, 0, now + 1)
        fill = gl.where(fill + 1 == STAGES, 0, fill + 1)

    if PDL and SPLIT:
        gdc_launch_dependents()  # the merge (sparse/triton/results.py)
    o = gl.reshape(gl.join(o_a, o_b), [GROUPS, BM, 128])
    result = (token * gl.num_programs(1) + gl.program_id(1)) * num_heads
    write_program(
        o, gl.sum(weight, 1), k, out_ptr, lse_ptr, sink_ptr, part_acc_ptr, part_sum_ptr, result,
        first_head, num_heads, HAS_SINK, SPLIT,
    )  # fmt: skip
