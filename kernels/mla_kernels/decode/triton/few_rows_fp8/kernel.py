# SPDX-License-Identifier: Apache-2.0
"""Dense MLA decode for 16 and 32 query rows over a per-tensor e4m3 cache: teams of eight warps on
mma.sync, as in few_rows/kernel.py, and a warp that loads.

    barrier   arrives       waits    means
    full      TMA, loader   a team   a cache tile is there, zeros past the request's end
    empty     a team        loader   P V of it is done
    handed    team 1        team 0   team 1's results of a segment are where its last tile was
    landed    TMA           loader   a tile that has rows to clear has landed

16 rows: two teams, each with half of the ring, take a segment's tiles in turn; while the warps of
one meet, those of the other compute. Team 0 adds the results of both, writes them, and arrives on
`empty` for the tile that they lay on. Each has 112 registers; for that most of q's `b`
(few_rows/operands.py) is read from shared memory, and the scores are one sum. 32 rows: one team.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from mla_kernels.decode.hopper.barriers import barriers
from mla_kernels.decode.hopper.layouts import BLOCK
from mla_kernels.decode.hopper.segments import read_start
from mla_kernels.decode.triton.few_rows_fp8.attend import attend
from mla_kernels.decode.triton.few_rows_fp8.stream import loader
from mla_kernels.decode.triton.few_rows_fp8.teams import VECTOR, team_memory

LATENT_RING = gl.constexpr(
    gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
)
ROPE_RING = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=16, rank=2))


@gluon.jit(do_not_specialize=["table_stride", "num_rows", "num_heads", "s_q"])
def few_rows_fp8_kernel(
    q_ptr,  # [B, s_q, H, 512 + 64]
    kv_desc,  # [num_blocks * 64, 288] 16-bit units, boxes [64, 256]
    kv_rope_desc,  # the same, boxes [64, 32]
    kv_scale,  # fp32, or with LOAD_SCALE a pointer to it
    table,  # [B, max_blocks] int32
    seq_lens,  # [B] int32
    parts,  # [parts, 8] int32: plan/kernel.py
    requests,  # [B, 4] int32: plan/kernel.py
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
    SLOTS: gl.constexpr,  # of a team
    TEAMS: gl.constexpr,
    LOAD_SCALE: gl.constexpr,
    CAUSAL: gl.constexpr,
    CHUNKED: gl.constexpr,
    TEAM_REGS: gl.constexpr,
    LOADER_REGS: gl.constexpr,
):
    start = read_start(parts)
    cache_scale = gl.load(kv_scale) if LOAD_SCALE else kv_scale
    ring = gl.allocate_shared_memory(gl.bfloat16, [TEAMS * SLOTS, BLOCK, 256], LATENT_RING)
    rope_ring = gl.allocate_shared_memory(gl.bfloat16, [TEAMS * SLOTS, BLOCK, 32], ROPE_RING)
    memory = team_memory(BM)
    sums = gl.allocate_shared_memory(gl.float32, [2 * SLOTS, BM], VECTOR)  # l and k handed over
    full = barriers(TEAMS * SLOTS, 1)
    empty = barriers(TEAMS * SLOTS, 1)
    handed = full
    if TEAMS > 1:  # one team hands nothing over, and the place of a dead barrier is used again
        handed = barriers(SLOTS, 1)
    landed = barriers(1, 1).index(0)
    if TEAMS == 1:
        fence_async_shared()
        gl.warp_specialize(
            [
                (attend, (
                    start, seq_lens, requests, table, table_stride, q_ptr, q_stride_b, q_stride_s,
                    q_stride_h, out, lse, part_acc, part_sums, scale_log2, cache_scale, num_rows,
                    num_heads, s_q, ring, rope_ring, memory, sums, full, empty, handed,
                    BM, SLOTS, TEAMS, 0, CAUSAL, CHUNKED,
                )),
                (loader, (
                    start, seq_lens, requests, table, table_stride, kv_desc, kv_rope_desc,
                    ring, rope_ring, full, empty, landed, SLOTS, TEAMS, CHUNKED,
                )),
            ],
            [1],
            [LOADER_REGS],
        )  # fmt: skip
    else:
        memory_1 = team_memory(BM)
        fence_async_shared()
        gl.warp_specialize(
            [
                (attend, (
                    start, seq_lens, requests, table, table_stride, q_ptr, q_stride_b, q_stride_s,
                    q_stride_h, out, lse, part_acc, part_sums, scale_log2, cache_scale, num_rows,
                    num_heads, s_q, ring, rope_ring, memory, sums, full, empty, handed,
                    BM, SLOTS, TEAMS, 0, CAUSAL, CHUNKED,
                )),
                (attend, (
                    start, seq_lens, requests, table, table_stride, q_ptr, q_stride_b, q_stride_s,
                    q_stride_h, out, lse, part_acc, part_sums, scale_log2, cache_scale, num_rows,
                    num_heads, s_q, ring, rope_ring, memory_1, sums, full, empty, handed,
                    BM, SLOTS, TEAMS, 1, CAUSAL, CHUNKED,
                )),
                (loader, (
                    start, seq_lens, requests, table, table_stride, kv_desc, kv_rope_desc,
                    ring, rope_ring, full, empty, landed, SLOTS, TEAMS, CHUNKED,
                )),
            ],
            [8, 1],
            [TEAM_REGS, LOADER_REGS],
        )  # fmt: skip
