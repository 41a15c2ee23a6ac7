# SPDX-License-Identifier: Apache-2.0
"""Dense MLA decode for 16 and 32 query rows on mma.sync, for Ampere's instructions and newer.

A program is one tile of query rows times one part of the plan, as in decode/triton/kernel.py; what
differs is who does what. In both products a warp owns one group of 128 latent columns: its part of
q stays in its registers, K and V are read from shared memory once, and codes become fp16 in the
registers that feed the tensor cores.

    ring of tiles ── q K^T of each group ──> partial scores, shared ── sum, softmax: whole rows a
    (cp.async)                                                         warp ── P, shared ── P V

fp8_ds_mla: group g of a token has the scale s_g. Partial scores take it as a factor. For P V, P
follows t + log2 max s instead of the score t, group g takes the factor s_g / max s in fp16, and the
row sum divides by max s again.

As with "fp8" in decode/triton/kernel.py, neither K nor V is rounded to bf16.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.language.extra.cuda import gdc_launch_dependents

from mla_kernels import numerics
from mla_kernels.decode.plan import kernel as plan_kernel
from mla_kernels.decode.triton.few_rows.copies import copy_tile, load_pages
from mla_kernels.decode.triton.few_rows.operands import (
    KEYS_TO_F16,
    LEAST_SCALE,
    VALUES_TO_F16,
    codes_to_f16,
)
from mla_kernels.decode.triton.few_rows.query import load_latent, load_rope, query_operands
from mla_kernels.decode.triton.few_rows.results import per_row, write_out
from mla_kernels.decode.triton.softmax import integer_reference, pow2_int

PLAN_TILE = gl.constexpr(plan_kernel.PLAN_TILE)
GRID_OFFSET = gl.constexpr(numerics.GRID_OFFSET)
EXPONENT_FLOOR = gl.constexpr(numerics.EXPONENT_FLOOR)
TAU = gl.constexpr(numerics.TAU)


@gluon.jit(do_not_specialize=["page_step", "table_stride", "num_rows", "num_heads", "s_q"])
def few_rows_kernel(
    q_ptr,  # [B, s_q, H, DV + DR]
    kv_ptr,  # [num_blocks, PAGE, row], 16-bit units
    scale_ptr,  # fp8_ds_mla: the cache as fp32
    kv_scale,  # fp8: fp32, or with LOAD_SCALE a pointer to it
    table_ptr,  # [B, max_blocks] int32
    lens_ptr,  # [B] int32
    parts_ptr,  # [parts, 8] int32: plan/kernel.py
    requests_ptr,  # [B, 4] int32: plan/kernel.py
    out_ptr,  # [B, s_q, H, DV]
    lse_ptr,  # [B, s_q, H] fp32
    part_acc_ptr,  # [slots, s_q * H, DV] fp32
    part_sum_ptr,  # [slots, s_q * H, 2] fp32: l, k
    scale_log2,  # softmax scale * log2(e)
    q_stride_b,
    q_stride_s,
    q_stride_h,
    page_step,  # a page's stride in 16 bytes
    table_stride,
    num_rows,  # s_q * H
    num_heads,
    s_q,
    BM: gl.constexpr,
    BN: gl.constexpr,
    DV: gl.constexpr,
    DR: gl.constexpr,
    PAGE: gl.constexpr,
    ROW: gl.constexpr,  # a row's stride in 16-bit units
    FORMAT: gl.constexpr,
    SCALE_OFFSET: gl.constexpr,  # in fp32
    ROPE_OFFSET: gl.constexpr,  # in 16-bit units
    LOAD_SCALE: gl.constexpr,
    CAUSAL: gl.constexpr,
    CHUNKED: gl.constexpr,
    WARPS: gl.constexpr,
    STAGES: gl.constexpr,
    PDL: gl.constexpr,
):
    CODES: gl.constexpr = FORMAT != "float"
    SCALED: gl.constexpr = FORMAT == "fp8_ds_mla"
    # Ask for the next tile between the two products, where a barrier stands anyway, and give the
    # scores two sums, which ptxas then does not wait for one after the other. Measured to be
    # faster for this format only; fp8_ds_mla would spill.
    LATE: gl.constexpr = FORMAT == "fp8"
    GROUPS: gl.constexpr = DV // 128
    UNITS: gl.constexpr = 64 if CODES else 128  # of a group
    ROPE_UNITS: gl.constexpr = DR // 2 if FORMAT == "fp8" else DR
    UNIT: gl.constexpr = kv_ptr.dtype.element_ty
    DTYPE: gl.constexpr = gl.float16 if CODES else q_ptr.dtype.element_ty
    ROPE_DTYPE: gl.constexpr = gl.float16 if FORMAT == "fp8" else q_ptr.dtype.element_ty

    # Registers: MMA both products of the latent, ROPE_MMA that of the rope part.
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [GROUPS, 1, WARPS // GROUPS], [1, 16, 8])
    ROPE_MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, WARPS], [16, 8])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    ROPE_LEFT: gl.constexpr = gl.DotOperandLayout(0, ROPE_MMA, 2)
    ROPE_RIGHT: gl.constexpr = gl.DotOperandLayout(1, ROPE_MMA, 2)
    PARTIAL: gl.constexpr = gl.BlockedLayout(
        [GROUPS, 1, 4], [1, 128 // BN, BN // 4], [1, WARPS, 1], [2, 1, 0]
    )
    SCORES: gl.constexpr = gl.SliceLayout(0, PARTIAL)
    SCORE_ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    SCORE_TOKEN: gl.constexpr = gl.SliceLayout(0, SCORES)
    O_ROW: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, MMA))

    # Shared memory, swizzled so that 8 rows of 16 bytes meet no bank twice.
    ROPE_PHASE: gl.constexpr = max(1, 64 // ROPE_UNITS)
    P_PHASE: gl.constexpr = max(1, 64 // BN)
    LATENT: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [2, 1, 0])
    ROPE: gl.constexpr = gl.SwizzledSharedLayout(8, ROPE_PHASE, 8 // ROPE_PHASE, [1, 0])
    WEIGHTS: gl.constexpr = gl.SwizzledSharedLayout(8, P_PHASE, 8 // P_PHASE, [1, 0])
    SUMS: gl.constexpr = gl.SwizzledSharedLayout(8, 1, min(8, BN // 8), [2, 1, 0])
    ROPE_SUMS: gl.constexpr = gl.SwizzledSharedLayout(8, 1, min(8, BN // 8), [1, 0])
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    VECTOR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    latent_ring = gl.allocate_shared_memory(UNIT, [STAGES, GROUPS, BN, UNITS], LATENT)
    rope_ring = gl.allocate_shared_memory(UNIT, [STAGES, BN, ROPE_UNITS], ROPE)
    partial_shared = gl.allocate_shared_memory(gl.float32, [GROUPS, BM, BN], SUMS)
    rope_shared = gl.allocate_shared_memory(gl.float32, [BM, BN], ROPE_SUMS)
    p_shared = gl.allocate_shared_memory(DTYPE, [BM, BN], WEIGHTS)
    factor_shared = gl.allocate_shared_memory(gl.float32, [BM], VECTOR)
    q_rope_shared = gl.allocate_shared_memory(
        ROPE_DTYPE, [2 if FORMAT == "fp8" else 1, BM, ROPE_UNITS], ROPE
    )
    scale_ring = rope_ring
    ratio_shared = p_shared
    if SCALED:
        scale_ring = gl.allocate_shared_memory(gl.float32, [STAGES, BN, 4], PLAIN)
        ratio_shared = gl.allocate_shared_memory(gl.float16, [GROUPS, BN], PLAIN)

    cache_scale = 1.0
    if FORMAT == "fp8":  # the codes are multiplied as they are
        cache_scale = gl.load(kv_scale) if LOAD_SCALE else kv_scale
    token = gl.arange(0, BN, SCORE_TOKEN)
    row = gl.program_id(0) * BM + gl.arange(0, BM, SCORE_ROW)
    ones = gl.full([BM, BN], 1.0, gl.float32, SCORES)

    part = parts_ptr + gl.program_id(1) * 8
    request = gl.load(part + 0)
    tile = gl.load(part + 1) * (PLAN_TILE // BN)
    last_request = gl.load(part + 2)
    last_end = gl.load(part + 3) * (PLAN_TILE // BN)
    split = gl.load(part + 4)
    while request <= last_request:
        length = gl.load(lens_ptr + request)
        end = (length + BN - 1) // BN
        if request == last_request:
            end = gl.minimum(last_end, end)
        slot = gl.load(requests_ptr + request * 4 + 0)
        splits = gl.load(requests_ptr + request * 4 + 1)
        chunk = end
        if CHUNKED:
            chunk = gl.load(requests_ptr + request * 4 + 2) * (PLAN_TILE // BN)
        # Keys that row r may see: all of the request's, or with CAUSAL those up to its own token.
        limit = length
        if CAUSAL:
            limit = length - s_q + 1 + row // num_heads
        table = table_ptr + request.to(gl.int64) * table_stride
        q_at = q_ptr + request.to(gl.int64) * q_stride_b
        while tile < end:
            stop = gl.minimum(tile + chunk, end)
            pages = load_pages(table, tile, length, BN, PAGE)
            first = gl.program_id(0) * BM
            q = load_latent(
                q_at, first, q_stride_s, q_stride_h, num_rows, num_heads, GROUPS, BM, WARPS
            )
            q_rope = load_rope(
                q_at, first, q_stride_s, q_stride_h, num_rows, num_heads, DV, BM, DR, WARPS
            )
            for depth in gl.static_range(STAGES - 1):
                if tile + depth < stop:
                    copy_tile(
                        kv_ptr, scale_ptr, page_step, pages, tile + depth, length,
                        latent_ring.index(depth), rope_ring.index(depth), scale_ring.index(depth),
                        PAGE, ROW, SCALED, SCALE_OFFSET, ROPE_OFFSET, WARPS,
                    )  # fmt: skip
                async_copy.commit_group()
                pages = load_pages(table, tile + depth + 1, length, BN, PAGE)
            # The ring's last slot is still empty: q passes through it.
            stage = latent_ring.index(STAGES - 1).slice(0, BM, dim=1)
            q_a, q_b, up = query_operands(q, q_rope, stage, q_rope_shared, LEFT, FORMAT)
            row_scale = scale_log2 * cache_scale
            if FORMAT == "fp8":
                row_scale = row_scale * up

            k = gl.full([BM], EXPONENT_FLOOR, gl.float32, SCORE_ROW)
            weight = gl.full([BM, BN], 0.0, gl.float32, SCORES)  # row sums, one a column
            o_a = gl.full([GROUPS, BM, UNITS], 0.0, gl.float32, MMA)
            o_b = o_a
            now = gl.to_tensor(0)
            fill = gl.to_tensor(STAGES - 1)
            for i in range(tile, stop):
                async_copy.wait_group(STAGES - 2)
                if not LATE:
                    if i + STAGES - 1 < stop:
                        copy_tile(
                            kv_ptr, scale_ptr, page_step, pages, i + STAGES - 1, length,
                            latent_ring.index(fill), rope_ring.index(fill), scale_ring.index(fill),
                            PAGE, ROW, SCALED, SCALE_OFFSET, ROPE_OFFSET, WARPS,
                        )  # fmt: skip
                    async_copy.commit_group()
                    pages = load_pages(table, i + STAGES, length, BN, PAGE)
                latent = latent_ring.index(now)

                units = latent.permute((0, 2, 1)).load(RIGHT)
                qk = gl.full([GROUPS, BM, BN], 0.0, gl.float32, MMA)
                if CODES:
                    keys_a, keys_b = codes_to_f16(units, KEYS_TO_F16)
                    if LATE:
                        qk_b = mma_v2(q_b, keys_b, qk)
                        qk = mma_v2(q_a, keys_a, qk) + qk_b
                    else:
                        qk = mma_v2(q_a, keys_a, qk)
                        qk = mma_v2(q_b, keys_b, qk)
                else:
                    qk = mma_v2(q_a, units, qk)
                partial_shared.store(qk)
                units = rope_ring.index(now).permute((1, 0)).load(ROPE_RIGHT)
                qk = gl.full([BM, BN], 0.0, gl.float32, ROPE_MMA)
                if FORMAT == "fp8":
                    keys_a, keys_b = codes_to_f16(units, KEYS_TO_F16)
                    qk_b = mma_v2(q_rope_shared.index(1).load(ROPE_LEFT), keys_b, qk)
                    qk = mma_v2(q_rope_shared.index(0).load(ROPE_LEFT), keys_a, qk) + qk_b
                else:
                    keys = units.to(ROPE_DTYPE)
                    qk = mma_v2(q_rope_shared.index(0).load(ROPE_LEFT), keys, qk)
                rope_shared.store(qk)

                if SCALED:
                    scale = scale_ring.index(now).permute((1, 0)).load(gl.SliceLayout(1, PARTIAL))
                partial = partial_shared.load(PARTIAL)
                rope_part = rope_shared.load(SCORES)
                if LATE:
                    if i + STAGES - 1 < stop:
                        copy_tile(
                            kv_ptr, scale_ptr, page_step, pages, i + STAGES - 1, length,
                            latent_ring.index(fill), rope_ring.index(fill), scale_ring.index(fill),
                            PAGE, ROW, SCALED, SCALE_OFFSET, ROPE_OFFSET, WARPS,
                        )  # fmt: skip
                    async_copy.commit_group()
                    pages = load_pages(table, i + STAGES, length, BN, PAGE)
                offset = ones * GRID_OFFSET
                if SCALED:
                    partial = partial * gl.expand_dims(scale * up, 1)
                    most = gl.maximum(gl.max(gl.abs(scale), 0), LEAST_SCALE)
                    inverse = 1.0 / most
                    ratio_shared.store((scale * inverse[None, :]).to(gl.float16))
                    most = gl.convert_layout(most, SCORE_TOKEN, assert_trivial=True)
                    inverse = gl.convert_layout(inverse, SCORE_TOKEN, assert_trivial=True)
                    offset += gl.log2(most)[None, :]
                qk = gl.sum(partial, 0) + rope_part
                t = gl.fma(qk, ones * row_scale, offset)
                left = limit - i * BN
                if CAUSAL:
                    seen = token[None, :] < left[:, None]
                else:
                    seen = (token < left)[None, :]
                t = gl.where(seen, t, float("-inf"))
                t_max = integer_reference(gl.max(t, 1))
                k_new = gl.where(t_max > k + TAU, t_max, k)
                factor = pow2_int(k - k_new)
                k = k_new
                p = gl.exp2(t - (k + GRID_OFFSET)[:, None])
                rounded = p.to(DTYPE)
                if SCALED:
                    weight = weight * factor[:, None] + p * inverse[None, :]
                else:
                    weight = weight * factor[:, None] + rounded.to(gl.float32)
                factor_shared.store(factor)
                p_shared.store(rounded)

                factor = per_row(factor_shared.load(O_ROW))
                o_a = o_a * factor
                if CODES:
                    o_b = o_b * factor
                p = gl.expand_dims(p_shared.load(gl.SliceLayout(0, LEFT)), 0)
                p, _ = gl.broadcast(p, gl.full([GROUPS, 1, 1], 0.0, DTYPE, LEFT))
                if SCALED:
                    p = p * gl.expand_dims(ratio_shared.load(gl.SliceLayout(1, LEFT)), 1)
                units = latent.load(RIGHT)
                if CODES:
                    values_a, values_b = codes_to_f16(units, VALUES_TO_F16)
                    o_a = mma_v2(p, values_a, o_a)
                    o_b = mma_v2(p, values_b, o_b)
                else:
                    o_a = mma_v2(p, units, o_a)
                now = gl.where(now + 1 == STAGES, 0, now + 1)
                fill = gl.where(fill + 1 == STAGES, 0, fill + 1)

            if PDL:  # noqa: SIM102 (known to the compiler, the other is not)
                if request == last_request:
                    gdc_launch_dependents()
            o = o_a
            if CODES:
                o = gl.reshape(gl.join(o_a, o_b), [GROUPS, BM, 128])
            write_out(
                o, gl.sum(weight, 1), k, cache_scale, out_ptr, lse_ptr, part_acc_ptr, part_sum_ptr,
                request, splits, slot + split, num_rows,
            )  # fmt: skip
            split += 1
            tile = stop
        request += 1
        tile = tile * 0
        split = split * 0
