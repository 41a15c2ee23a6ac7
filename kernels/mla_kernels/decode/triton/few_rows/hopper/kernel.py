# SPDX-License-Identifier: Apache-2.0
"""Dense MLA decode for 16 and 32 query rows over a per-tensor e4m3 cache: eight warps on mma.sync,
as in few_rows/kernel.py, and a warp that loads.

    barrier   arrives       waits    means
    full      TMA, loader   eight    a cache tile is there, zeros past the request's end
    empty     eight         loader   P V of it is done
    landed    TMA           loader   a tile that has rows to clear has landed

Two programs of 16 rows share an SM: while the warps of one meet, those of the other compute. Each
has 104 registers; for that most of q's `b` (few_rows/operands.py) is read from shared memory, and
the scores are one sum.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from mla_kernels import numerics
from mla_kernels.decode.hopper.layouts import BLOCK
from mla_kernels.decode.hopper.stream import (
    next_segment,
    read_start,
    ring_next,
    ring_previous,
    start_segment,
)
from mla_kernels.decode.triton.few_rows.hopper.query import STEP, load_query, units_of
from mla_kernels.decode.triton.few_rows.hopper.stream import loader
from mla_kernels.decode.triton.few_rows.operands import (
    KEYS_TO_F16,
    VALUES_TO_F16,
    codes_to_f16,
)
from mla_kernels.decode.triton.few_rows.results import per_row, write_out
from mla_kernels.decode.triton.hopper.kernel import barriers
from mla_kernels.decode.triton.softmax import integer_reference, pow2_int
from mla_kernels.triton_common.gluon_compat import cta_barrier, reinterpret

GRID_OFFSET = gl.constexpr(numerics.GRID_OFFSET)
EXPONENT_FLOOR = gl.constexpr(numerics.EXPONENT_FLOOR)
TAU = gl.constexpr(numerics.TAU)
LATENT_RING = gl.constexpr(
    gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
)
ROPE_RING = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=16, rank=2))


@gluon.jit
def attend(
    start, seq_lens, requests, table, table_stride, q_ptr, q_stride_b, q_stride_s, q_stride_h,
    out, lse, part_acc, part_sums, scale_log2, cache_scale, num_rows, num_heads, s_q,
    ring, rope_ring, partial_shared, rope_shared, p_shared, factor_shared, b_shared, q_rope_shared,
    full, empty, BM: gl.constexpr, SLOTS: gl.constexpr, CAUSAL: gl.constexpr,
    CHUNKED: gl.constexpr,
):  # fmt: skip
    """Scores, softmax, values and results of a part, by eight warps in step."""
    WARPS: gl.constexpr = 8
    BN: gl.constexpr = BLOCK
    GROUPS: gl.constexpr = 4
    UNITS: gl.constexpr = 64
    ROPE_UNITS: gl.constexpr = 32
    DR: gl.constexpr = 2 * ROPE_UNITS
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
    LANES: gl.constexpr = gl.BlockedLayout([1, 1], [128 // BN, BN // 4], [WARPS, 1], [1, 0])
    O_ROW: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, MMA))
    LATENT: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [2, 1, 0])
    ROPE: gl.constexpr = gl.SwizzledSharedLayout(8, 2, 4, [1, 0])

    latent_ring = reinterpret(ring, ring.dtype, [SLOTS, GROUPS, BN, UNITS], LATENT)
    keys_ring = reinterpret(rope_ring, ring.dtype, [SLOTS, BN, ROPE_UNITS], ROPE)
    a_shared = reinterpret(partial_shared, ring.dtype, [2, GROUPS, BM, UNITS], LATENT).index(0)
    token = gl.arange(0, BN, SCORE_TOKEN)
    row = gl.program_id(0) * BM + gl.arange(0, BM, SCORE_ROW)
    ones = gl.full([BM, BN], 1.0, gl.float32, SCORES)
    plan, request, lo, hi, end, split = start_segment(
        start, seq_lens, requests, table, table_stride, CHUNKED
    )
    i = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    while request <= plan.last:
        length = gl.load(seq_lens + request)
        limit = length
        if CAUSAL:
            limit = length - s_q + 1 + row // num_heads
        q_a, q_b, up = load_query(
            q_ptr + request.to(gl.int64) * q_stride_b, q_stride_s, q_stride_h, num_rows, num_heads,
            a_shared, b_shared, q_rope_shared, DR, LEFT, WARPS,
        )  # fmt: skip
        row_scale = scale_log2 * cache_scale * up

        k = gl.full([BM], EXPONENT_FLOOR, gl.float32, SCORE_ROW)
        weight = gl.full([BM, BN // 4], 0.0, gl.float32, LANES)  # row sums, one a thread
        o_a = gl.full([GROUPS, BM, UNITS], 0.0, gl.float32, MMA)
        o_b = o_a
        cta_barrier()
        for n in range(lo, hi):
            mbarrier.wait(full.index(i), phase)
            latent = latent_ring.index(i)
            qk = gl.full([GROUPS, BM, BN], 0.0, gl.float32, MMA)
            for c in gl.static_range(UNITS // STEP):
                units = latent.slice(c * STEP, STEP, dim=2).permute((0, 2, 1)).load(RIGHT)
                keys_a, keys_b = codes_to_f16(units, KEYS_TO_F16)
                qk = mma_v2(q_a[c], keys_a, qk)
                if c == 0:
                    qk = mma_v2(q_b, keys_b, qk)
                else:
                    qk = mma_v2(units_of(b_shared, c, LEFT), keys_b, qk)
            partial_shared.store(qk)
            units = keys_ring.index(i).permute((1, 0)).load(ROPE_RIGHT)
            keys_a, keys_b = codes_to_f16(units, KEYS_TO_F16)
            qk = gl.full([BM, BN], 0.0, gl.float32, ROPE_MMA)
            qk_b = mma_v2(q_rope_shared.index(1).load(ROPE_LEFT), keys_b, qk)
            qk = mma_v2(q_rope_shared.index(0).load(ROPE_LEFT), keys_a, qk) + qk_b
            rope_shared.store(qk)

            cta_barrier()
            # All are past P V of the tile before. An arrival: `arrive` would bring two barriers.
            mbarrier.expect(empty.index(ring_previous(i, SLOTS)), 0, pred=n > lo)
            qk = gl.sum(partial_shared.load(PARTIAL), 0) + rope_shared.load(SCORES)
            t = gl.fma(qk, ones * row_scale, ones * GRID_OFFSET)
            left = limit - n * BN
            if CAUSAL:
                seen = token[None, :] < left[:, None]
            else:
                seen = (token < left)[None, :]
            t = gl.where(seen, t, float("-inf"))
            t_max = integer_reference(gl.max(t, 1))
            k_new = gl.where(t_max > k + TAU, t_max, k)
            factor = pow2_int(k - k_new)
            k = k_new
            p = gl.exp2(t - (k + GRID_OFFSET)[:, None]).to(gl.float16)
            sums = gl.sum(gl.reshape(p.to(gl.float32), [BM, BN // 4, 4]), 2)
            by = gl.convert_layout(factor, gl.SliceLayout(1, LANES), assert_trivial=True)[:, None]
            weight = weight * by + gl.convert_layout(sums, LANES, assert_trivial=True)
            factor_shared.store(factor)
            p_shared.store(gl.permute(gl.reshape(p, [BM, BN // STEP, STEP]), (1, 0, 2)))

            factor = per_row(factor_shared.load(O_ROW))
            o_a = o_a * factor
            o_b = o_b * factor
            for c in gl.static_range(BN // STEP):
                p = p_shared.slice(c, 1, dim=0).load(LEFT)
                p, _ = gl.broadcast(p, gl.full([GROUPS, 1, 1], 0.0, gl.float16, LEFT))
                units = latent.slice(c * STEP, STEP, dim=1).load(RIGHT)
                values_a, values_b = codes_to_f16(units, VALUES_TO_F16)
                o_a = mma_v2(p, values_a, o_a)
                o_b = mma_v2(p, values_b, o_b)
            i, phase = ring_next(i, phase, SLOTS)
        mbarrier.arrive(empty.index(ring_previous(i, SLOTS)), count=1)

        slot = gl.load(requests + request * 4 + 0)
        splits = gl.load(requests + request * 4 + 1)
        after, after_lo, after_hi, after_end = next_segment(plan, request, hi, end)
        o = gl.reshape(gl.join(o_a, o_b), [GROUPS, BM, 2 * UNITS])
        l = gl.convert_layout(gl.sum(weight, 1), SCORE_ROW)
        write_out(
            o, l, k, cache_scale, out, lse, part_acc, part_sums, request, splits, slot + split,
            num_rows,
        )  # fmt: skip
        split = gl.where(after == request, split + 1, 0)
        request = after + 0
        lo = after_lo + 0
        hi = after_hi + 0
        end = after_end + 0


@gluon.jit(do_not_specialize=["table_stride", "num_rows", "num_heads", "s_q"])
def few_rows_fp8_kernel(
    q_ptr,  # [B, s_q, H, 512 + 64]
    kv_desc,  # [num_blocks * 64, 288] 16-bit units, boxes [64, 256]
    kv_rope_desc,  # the same, boxes [64, 32]
    kv_scale,  # fp32, or with LOAD_SCALE a pointer to it
    table,  # [B, max_blocks] int32
    seq_lens,  # [B] int32
    parts,  # [parts, 8] int32: plan_kernel.py
    requests,  # [B, 4] int32: plan_kernel.py
    out,  # [B, s_q, H, 512]
    lse,  # [B, s_q, H] fp32
    part_acc,  # [slots, s_q * H, 512] fp32
    part_sums,  # [slots, s_q * H, 2] fp32: l, k
    scale_log2,  # softmax scale * log2(e)
    q_stride_b,
    q_stride_s,
    q_stride_h,
    table_stride,
    num_rows,  # s_q * H
    num_heads,
    s_q,
    BM: gl.constexpr,
    SLOTS: gl.constexpr,
    LOAD_SCALE: gl.constexpr,
    CAUSAL: gl.constexpr,
    CHUNKED: gl.constexpr,
    LOADER_REGS: gl.constexpr,
):
    BN: gl.constexpr = BLOCK
    SUMS: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [2, 1, 0])
    ROPE_SUMS: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    ROPE: gl.constexpr = gl.SwizzledSharedLayout(8, 2, 4, [1, 0])
    WEIGHTS: gl.constexpr = gl.SwizzledSharedLayout(8, 4, 2, [2, 1, 0])
    VECTOR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    start = read_start(parts)
    cache_scale = gl.load(kv_scale) if LOAD_SCALE else kv_scale
    ring = gl.allocate_shared_memory(gl.bfloat16, [SLOTS, BN, 256], LATENT_RING)
    rope_ring = gl.allocate_shared_memory(gl.bfloat16, [SLOTS, BN, 32], ROPE_RING)
    partial_shared = gl.allocate_shared_memory(gl.float32, [4, BM, BN], SUMS)
    rope_shared = gl.allocate_shared_memory(gl.float32, [BM, BN], ROPE_SUMS)
    p_shared = gl.allocate_shared_memory(gl.float16, [BN // STEP, BM, STEP], WEIGHTS)
    factor_shared = gl.allocate_shared_memory(gl.float32, [BM], VECTOR)
    b_shared = gl.allocate_shared_memory(gl.float16, [4, BM, 64], SUMS)
    q_rope_shared = gl.allocate_shared_memory(gl.float16, [2, BM, 32], ROPE)
    full = barriers(SLOTS)
    empty = barriers(SLOTS)
    landed = barriers(1).index(0)
    fence_async_shared()
    gl.warp_specialize(
        [
            (attend, (
                start, seq_lens, requests, table, table_stride, q_ptr, q_stride_b, q_stride_s,
                q_stride_h, out, lse, part_acc, part_sums, scale_log2, cache_scale, num_rows,
                num_heads, s_q, ring, rope_ring, partial_shared, rope_shared, p_shared,
                factor_shared, b_shared, q_rope_shared, full, empty, BM, SLOTS, CAUSAL, CHUNKED,
            )),
            (loader, (
                start, seq_lens, requests, table, table_stride, kv_desc, kv_rope_desc,
                ring, rope_ring, full, empty, landed, SLOTS, CHUNKED,
            )),
        ],
        [1],
        [LOADER_REGS],
    )  # fmt: skip
