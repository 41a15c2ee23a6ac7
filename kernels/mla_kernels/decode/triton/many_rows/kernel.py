# SPDX-License-Identifier: Apache-2.0
"""Dense MLA decode for tiles of 64 query rows: two warpgroups in step, and a warp that loads.

    TMA ──> q A, B, R ─────────────────────┐
    TMA ──> ring A [2 x 64 x 256] ──┬──> S = q K^T ── softmax ── P, shared ──> O += P V
    TMA ──> ring B [2 x 64 x 256] ──┤    (a warpgroup has 32 tokens)    (it has half of the columns
    TMA ──> ring R [2 x 64 x 64]  ──┘                                    of each ring)

    barrier      arrives       waits       means
    full_a/b     TMA           both        a tile's half of ring A / B and R has landed
    empty_a/b    both          loader      P V of that half is done
    full_q       TMA           both        the query tile has landed
    empty_q      both          loader      its last scores are done

decode/hopper overlaps the softmax with products, which takes a role for each warpgroup; here all
eight warps do one thing after the other.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents

from mla_kernels import numerics
from mla_kernels.decode.hopper.barriers import barriers
from mla_kernels.decode.hopper.layouts import BLOCK, HALF, ROPE, TILE
from mla_kernels.decode.hopper.rings import ring_next
from mla_kernels.decode.hopper.segments import next_segment, read_start, start_segment, step_on
from mla_kernels.decode.triton.many_rows.softmax import (
    LANES,
    SCORES,
    any_passed,
    grid_scores,
    new_reference,
    weights_of,
)
from mla_kernels.decode.triton.many_rows.stream import loader
from mla_kernels.decode.triton.softmax import pow2_int
from mla_kernels.triton_common.gluon_compat import cta_barrier, reinterpret

EXPONENT_FLOOR = gl.constexpr(numerics.EXPONENT_FLOOR)
LN2 = gl.constexpr(numerics.LN2)
OUTPUT = gl.constexpr(
    gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 2], instr_shape=[16, 128, 16])
)
OUT_ROW = gl.constexpr(gl.SliceLayout(1, OUTPUT.value))
OUT_COL = gl.constexpr(gl.SliceLayout(0, OUTPUT.value))
QUERY = gl.constexpr(gl.DotOperandLayout(0, SCORES.value, 2))
SCORES_ROW = gl.constexpr(gl.SliceLayout(1, SCORES.value))
SCORES_COL = gl.constexpr(gl.SliceLayout(0, SCORES.value))
FLAGS = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [3, 2, 1, 0]))
PASS = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0]))
PASS_ROW = gl.constexpr(gl.SliceLayout(1, PASS.value))


@gluon.jit
def clear_rows_past(ring, slot, left):
    """Zero the rows of half a tile at or past `left`: 0 * NaN would reach O."""
    columns = reinterpret(ring, ring.dtype, [2 * (HALF // 64), BLOCK, 64], TILE)
    row = gl.arange(0, BLOCK, PASS_ROW)
    for quarter in range(HALF // 64):
        part = columns.index(slot * (HALF // 64) + quarter)
        part.store(gl.where((row < left)[:, None], part.load(PASS), 0.0))


@gluon.jit
def store_half(acc, factor, to, num_rows, COL: gl.constexpr):
    """acc [64, 256] times factor [64] to columns COL on of the rows [num_rows, 512] at `to`."""
    row = gl.program_id(0) * BLOCK + gl.arange(0, BLOCK, OUT_ROW)
    at = row[:, None] * (2 * HALF) + (COL + gl.arange(0, HALF, OUT_COL))[None, :]
    result = (acc * factor[:, None]).to(to.dtype.element_ty)
    gl.store(to + at, result, mask=(row < num_rows)[:, None])


@gluon.jit
def attend(
    start, seq_lens, requests, table, table_stride, out, lse, part_acc, part_sums,
    scale_log2, num_rows, num_heads, s_q, q_a, q_b, q_r, ring_a, ring_b, ring_r,
    weights, flags, full_q, empty_q, full_a, empty_a, full_b, empty_b,
    CAUSAL: gl.constexpr, CHUNKED: gl.constexpr,
):  # fmt: skip
    """Scores, softmax, values and results of a part, by eight warps in step."""
    LATENT: gl.constexpr = 2 * HALF
    DTYPE: gl.constexpr = weights.dtype
    plan, request, lo, hi, end, split = start_segment(
        start, seq_lens, requests, table, table_stride, CHUNKED
    )
    i = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    phase_q = gl.to_tensor(0)
    row = gl.program_id(0) * BLOCK + gl.arange(0, BLOCK, SCORES_ROW)
    col = gl.arange(0, BLOCK, SCORES_COL)
    while request <= plan.last:
        length = gl.load(seq_lens + request)
        limit = gl.full([BLOCK], 0, gl.int32, SCORES_ROW) + length
        unmasked = length // BLOCK
        if CAUSAL:
            limit = length - (s_q - 1) + row // num_heads
            unmasked = (length - (s_q - 1)) // BLOCK
        k = gl.full([BLOCK, 8], EXPONENT_FLOOR, gl.float32, LANES)
        l = gl.zeros([BLOCK, 8], gl.float32, LANES)
        acc_a = gl.zeros([BLOCK, HALF], gl.float32, OUTPUT)
        acc_b = gl.zeros([BLOCK, HALF], gl.float32, OUTPUT)
        mbarrier.wait(full_q, phase_q)
        phase_q = phase_q ^ 1
        q_rope = q_r.index(0).load(QUERY)  # in registers; for more there are none
        for n in range(lo, hi):
            mbarrier.wait(full_a.index(i), phase)
            if (n + 1) * BLOCK > length:
                mbarrier.wait(full_b.index(i), phase)
                clear_rows_past(ring_a, i, length - n * BLOCK)
                clear_rows_past(ring_b, i, length - n * BLOCK)
                fence_async_shared()
                cta_barrier()
            s = gl.zeros([BLOCK, BLOCK], gl.float32, SCORES)
            # 0, but not to the compiler: it would keep, and spill, a descriptor for each step of q.
            only = gl.inline_asm_elementwise(
                "mov.b32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
            )
            keys = ring_a.index(i).permute((1, 0))
            s = warpgroup_mma(q_a.index(only), keys, s, use_acc=False, is_async=True)
            mbarrier.wait(full_b.index(i), phase)
            keys = ring_b.index(i).permute((1, 0))
            s = warpgroup_mma(q_b.index(only), keys, s, is_async=True)
            s = warpgroup_mma(q_rope, ring_r.index(i).permute((1, 0)), s, is_async=True)
            s = warpgroup_mma_wait(0, deps=(s,))
            if n >= unmasked:
                s = gl.where((n * BLOCK + col)[None, :] < limit[:, None], s, -float("inf"))
            t, top, passed = grid_scores(s, k, scale_log2)
            p, sums = weights_of(t, k, DTYPE)
            flags.store(gl.reshape(passed, [4, 16, 2, 4]))
            weights.store(p)
            fence_async_shared()
            cta_barrier()
            # P was computed with the references as they were, which nearly always is right.
            if any_passed(flags.slice(0, 1, dim=1).slice(0, 1, dim=3)) != 0:
                k_new = new_reference(top, k)
                factor = pow2_int(k - k_new)
                by = gl.convert_layout(gl.max(factor, 1), OUT_ROW)[:, None]
                acc_a = acc_a * by
                acc_b = acc_b * by
                l = l * factor
                k = k_new
                p, sums = weights_of(t, k, DTYPE)
                weights.store(p)
                fence_async_shared()
                cta_barrier()
            l = l + sums
            token_a = warpgroup_mma(weights, ring_a.index(i), acc_a, is_async=True)
            token_b = warpgroup_mma(weights, ring_b.index(i), acc_b, is_async=True)
            acc_a, acc_b = warpgroup_mma_wait(1, deps=(token_a, token_b))
            mbarrier.arrive(empty_a.index(i), count=1)
            acc_a, acc_b = warpgroup_mma_wait(0, deps=(acc_a, acc_b))
            mbarrier.arrive(empty_b.index(i), count=1)
            i, phase = ring_next(i, phase, 2)
        mbarrier.arrive(empty_q, count=1)
        slot = gl.load(requests + request * 4 + 0)
        splits = gl.load(requests + request * 4 + 1)
        after, after_lo, after_hi, after_end = next_segment(plan, request, hi, end)
        if after > plan.last:  # the merge (decode/merge/kernel.py)
            gdc_launch_dependents()

        total = gl.convert_layout(gl.sum(l, 1), SCORES_ROW)
        reference = gl.convert_layout(gl.max(k, 1), SCORES_ROW)
        seen = total != 0.0  # NaN too
        if splits == 1:
            factor = gl.convert_layout(gl.where(seen, 1.0 / total, 0.0), OUT_ROW)
            to = out + request.to(gl.int64) * num_rows * LATENT
            store_half(acc_a, factor, to, num_rows, 0)
            store_half(acc_b, factor, to, num_rows, HALF)
            value = gl.where(seen, (reference + gl.log2(total)) * LN2, -float("inf"))
            gl.store(lse + request * num_rows + row, value, mask=row < num_rows)
        else:
            factor = gl.full([BLOCK], 1.0, gl.float32, OUT_ROW)
            partial = part_acc + (slot + split).to(gl.int64) * num_rows * LATENT
            store_half(acc_a, factor, partial, num_rows, 0)
            store_half(acc_b, factor, partial, num_rows, HALF)
            at = ((slot + split) * num_rows + row) * 2
            gl.store(part_sums + at, total, mask=row < num_rows)
            gl.store(part_sums + at + 1, reference, mask=row < num_rows)
        request, lo, hi, end, split = step_on(request, split, after, after_lo, after_hi, after_end)


@gluon.jit(do_not_specialize=["table_stride", "num_rows", "num_heads", "s_q"])
def many_rows_kernel(
    q_desc,  # latent part [B, s_q * H, 512], boxes [1, 64, 256]
    q_rope_desc,  # rope part [B, s_q * H, 64], boxes [1, 64, 64]
    kv_desc,  # [num_blocks * 64, 576], boxes [64, 256]
    kv_rope_desc,  # the same, boxes [64, 64]
    table,  # [B, max_blocks] int32
    seq_lens,  # [B] int32
    parts,  # [parts, 8] int32: plan/kernel.py
    requests,  # [B, 4] int32: plan/kernel.py
    out,  # [B, s_q, H, 512]
    lse,  # [B, s_q, H] fp32
    part_acc,  # [slots, s_q * H, 512] fp32
    part_sums,  # [slots, s_q * H, 2] fp32: l, k
    scale_log2,
    table_stride,
    num_rows,  # s_q * H
    num_heads,
    s_q,
    CAUSAL: gl.constexpr,
    CHUNKED: gl.constexpr,
    LOADER_REGS: gl.constexpr,
):
    DTYPE: gl.constexpr = out.dtype.element_ty
    start = read_start(parts)
    q_a = gl.allocate_shared_memory(DTYPE, [1, BLOCK, HALF], TILE)
    q_b = gl.allocate_shared_memory(DTYPE, [1, BLOCK, HALF], TILE)
    q_r = gl.allocate_shared_memory(DTYPE, [1, BLOCK, ROPE], TILE)
    ring_a = gl.allocate_shared_memory(DTYPE, [2, BLOCK, HALF], TILE)
    ring_b = gl.allocate_shared_memory(DTYPE, [2, BLOCK, HALF], TILE)
    ring_r = gl.allocate_shared_memory(DTYPE, [2, BLOCK, ROPE], TILE)
    weights = gl.allocate_shared_memory(DTYPE, [BLOCK, BLOCK], TILE)
    flags = gl.allocate_shared_memory(gl.int32, [4, 16, 2, 4], FLAGS)
    full_a = barriers(2, 1)
    full_b = barriers(2, 1)
    empty_a = barriers(2, 1)
    empty_b = barriers(2, 1)
    full_q = barriers(1, 1).index(0)
    empty_q = barriers(1, 1).index(0)
    fence_async_shared()
    gl.warp_specialize(
        [
            (attend, (
                start, seq_lens, requests, table, table_stride, out, lse, part_acc, part_sums,
                scale_log2, num_rows, num_heads, s_q, q_a, q_b, q_r, ring_a, ring_b, ring_r,
                weights, flags, full_q, empty_q, full_a, empty_a, full_b, empty_b, CAUSAL, CHUNKED,
            )),
            (loader, (
                start, seq_lens, requests, table, table_stride,
                q_desc, q_rope_desc, kv_desc, kv_rope_desc, q_a, q_b, q_r, ring_a, ring_b, ring_r,
                full_q, empty_q, full_a, empty_a, full_b, empty_b, CHUNKED,
            )),
        ],
        [1],
        [LOADER_REGS],
    )  # fmt: skip
