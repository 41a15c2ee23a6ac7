# SPDX-License-Identifier: Apache-2.0
"""Warpgroups 1 and 2 with an fp8_ds_mla cache: each gathers its half of tile n + 2 as codes, and
turns its half of tile n + 1 into fp16 before it waits for P(n)."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from mla_kernels.decode.hopper.layouts import (
    BLOCK,
    DS_MLA_ROPE,
    HALF,
    OUTPUT,
    PASS_64,
    SCALE_COL,
)
from mla_kernels.decode.hopper.rings import ring_next, ring_previous, ring_step
from mla_kernels.decode.hopper.scales import FIRST, next_exponent, power_of_two
from mla_kernels.layouts import Fp8DsMlaLayout
from mla_kernels.sparse.hopper.gather import (
    gather,
    load_slots,
    program_rows,
    program_token,
    slot_rows,
    store_offsets,
)
from mla_kernels.sparse.hopper.layouts import GATHER_CODES, GATHER_ROPE, GATHER_SCALES
from mla_kernels.sparse.hopper.scales import (
    load_scalar,
    store_scalar,
    times_ratio,
    twice_f16,
)
from mla_kernels.sparse.hopper.values import (
    LATENT,
    add_values,
    finish_values,
    start_values,
    store_output,
    store_part,
)
from mla_kernels.sparse.hopper.walk import part_of, program_walk, row_of, walk_rows
from mla_kernels.triton_common.gluon_compat import aggregate

GROUP = gl.constexpr(Fp8DsMlaLayout().group_size)


@aggregate
class Codes:
    """One warpgroup's half of a tile on its way to fp16.

    kv, kv_scale, kv_rope   the cache as uint8, fp32 and bf16
    codes, scales           [64, 256] uint8 and [2, 64, 4] fp32, where the copies land
    tiles, full             [2, 64, 256] fp16 and the barriers that say they may be read
    rope                    [SLOTS_R, 64, 64] bf16, of the second half only
    m_ring                  [SLOTS_R, 1] fp32, of it too: M (decode/hopper/scales.py)
    offsets                 [SLOTS_R, 64] fp32, of it too: what scores on the grid are added to
    """

    kv: gl.tensor
    kv_scale: gl.tensor
    kv_rope: gl.tensor
    codes: gl.shared_memory_descriptor
    scales: gl.shared_memory_descriptor
    tiles: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    rope: gl.shared_memory_descriptor
    offsets: gl.shared_memory_descriptor
    m_ring: gl.shared_memory_descriptor
    COL: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self, kv, kv_scale, kv_rope, codes, scales, tiles, full, rope, offsets, m_ring, COL
    ):
        self.kv = kv
        self.kv_scale = kv_scale
        self.kv_rope = kv_rope
        self.codes = codes
        self.scales = scales
        self.tiles = tiles
        self.full = full
        self.rope = rope
        self.offsets = offsets
        self.m_ring = m_ring
        self.COL = gl.constexpr(COL)


@gluon.jit
def gather_codes(c, rows, slot, ir):
    """Start copying a tile's codes; its rope columns straight to slot `ir` of their ring."""
    row, ok = slot_rows(rows, slot)
    gather(c.codes, c.kv, row, ok, c.COL, GATHER_CODES)
    if c.COL > 0:
        store_offsets(c.offsets.index(ir), ok)
        gather(c.rope.index(ir), c.kv_rope, row // 2, ok, DS_MLA_ROPE, GATHER_ROPE)
    async_copy.commit_group()


@gluon.jit
def gather_scales(c, rows, slot, i):
    """Start copying a tile's scales."""
    row, ok = slot_rows(rows, slot)
    gather(c.scales.index(i), c.kv_scale, row // 4, ok, SCALE_COL, GATHER_SCALES)
    async_copy.commit_group()


@gluon.jit
def convert(c, iv, ir, exponent):
    """The codes, which have landed, to fp16 in slot `iv`, as it is for their scales; `ir`: the slot
    of their rope columns; exponent: log2 M."""
    tile = c.tiles.index(iv)
    down = power_of_two(-exponent)
    for j in gl.static_range(HALF // 64):
        scales = c.scales.index(iv).slice((c.COL + j * 64) // GROUP, 1, dim=1)
        codes = c.codes.slice(j * 64, 64, dim=1).load(PASS_64)
        ratio = twice_f16(scales.load(PASS_64) * down)
        tile.slice(j * 64, 64, dim=1).store(times_ratio(codes, ratio))
    if c.COL > 0:
        store_scalar(c.m_ring.index(ir), power_of_two(exponent))
    fence_async_shared()
    mbarrier.arrive(c.full.index(iv), count=1)


@gluon.jit
def attend_range(
    c, rows, num_tiles, full_q, phase, p_ring, full_p, empty_p, factors, iv, ir, ip, pp,
    SLOTS_R: gl.constexpr, SLOTS_P: gl.constexpr,
):  # fmt: skip
    """(O, iv, ir, ip, pp) behind a range of a token's slots, whose first tile goes to slot `iv` of
    the tiles, its rope columns to slot `ir`; `phase` of full_q."""
    slot = load_slots(rows, 0, GATHER_CODES)
    gather_scales(c, rows, slot, iv)
    gather_codes(c, rows, slot, ir)
    slot = load_slots(rows, 1, GATHER_CODES)
    gather_scales(c, rows, slot, iv ^ 1)
    async_copy.wait_group(0)
    exponent = next_exponent(c.scales.index(iv), FIRST)
    convert(c, iv, ir, exponent)
    ir = ring_step(ir, SLOTS_R)
    gather_codes(c, rows, slot, ir)
    exponent = next_exponent(c.scales.index(iv ^ 1), exponent)
    slot = load_slots(rows, 2, GATHER_CODES)
    mbarrier.wait(full_q, phase)
    tiles = load_scalar(num_tiles)
    ir = ring_step(ir, SLOTS_R)
    acc = gl.zeros([BLOCK, HALF], gl.float32, OUTPUT)
    for n in range(tiles - 1):
        gather_scales(c, rows, slot, iv)
        async_copy.wait_group(1)
        convert(c, iv ^ 1, ring_previous(ir, SLOTS_R), exponent)
        gather_codes(c, rows, slot, ir)
        slot = load_slots(rows, n + 3, GATHER_CODES)
        mbarrier.wait(full_p.index(ip), pp)
        token_v = start_values(acc, p_ring, c.tiles.index(iv), factors, ip)
        async_copy.wait_group(1)
        exponent = next_exponent(c.scales.index(iv), exponent)
        acc = finish_values(token_v, empty_p, ip)
        iv = iv ^ 1
        ir = ring_step(ir, SLOTS_R)
        ip, pp = ring_next(ip, pp, SLOTS_P)
    async_copy.wait_group(0)
    mbarrier.wait(full_p.index(ip), pp)
    acc = add_values(acc, p_ring, c.tiles.index(iv), factors, empty_p, ip)
    ip, pp = ring_next(ip, pp, SLOTS_P)
    return acc, iv ^ 1, ring_previous(ir, SLOTS_R), ip, pp


@gluon.jit
def values_fp8_warpgroup(
    out, part_acc, kv, kv_scale, kv_rope, slots, slots_stride, lengths, K, span, splits,
    num_tokens, num_slots, page_stride, num_heads, tiles, full, codes, scales, ring_r, offsets,
    m_ring, num_tiles, full_q, p_ring, full_p, empty_p, factors, inverse, full_out,
    COL: gl.constexpr, SLOTS_R: gl.constexpr, SLOTS_P: gl.constexpr,
    PAGE: gl.constexpr, ROW: gl.constexpr, HAS_LENGTHS: gl.constexpr, SPLIT: gl.constexpr,
    SHARES: gl.constexpr,
):  # fmt: skip
    c = Codes(kv, kv_scale, kv_rope, codes, scales, tiles, full, ring_r, offsets, m_ring, COL)
    iv = gl.to_tensor(0)
    ir = gl.to_tensor(0)
    ip = gl.to_tensor(0)
    pp = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    if SHARES:
        walk = program_walk(num_tokens, K, span, SHARES)
        for token in range(walk.first, walk.end):
            rows = walk_rows(
                walk, token, slots, slots_stride, lengths, K, num_slots, page_stride,
                PAGE, ROW, HAS_LENGTHS,
            )  # fmt: skip
            acc, iv, ir, ip, pp = attend_range(
                c, rows, num_tiles, full_q, phase, p_ring, full_p, empty_p, factors,
                iv, ir, ip, pp, SLOTS_R, SLOTS_P,
            )  # fmt: skip
            phase = phase ^ 1
            part = part_acc + row_of(part_of(walk, token, splits), num_heads) * LATENT
            store_part(acc, part, gl.program_id(1) * BLOCK, num_heads, COL)
    else:
        token, first_head = program_token(num_heads)
        rows = program_rows(
            slots, slots_stride, lengths, K, span, token, num_slots, page_stride,
            PAGE, ROW, HAS_LENGTHS,
        )  # fmt: skip
        acc, iv, ir, ip, pp = attend_range(
            c, rows, num_tiles, full_q, phase, p_ring, full_p, empty_p, factors,
            iv, ir, ip, pp, SLOTS_R, SLOTS_P,
        )  # fmt: skip
        store_output(
            acc, out, part_acc, inverse, full_out, token, first_head, num_heads, COL, SPLIT
        )
