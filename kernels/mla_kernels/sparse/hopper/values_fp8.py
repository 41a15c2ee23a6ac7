# SPDX-License-Identifier: Apache-2.0
"""Warpgroups 1 and 2 with an fp8_ds_mla cache: each gathers its half of tile n + 2 as codes, and
turns its half of tile n + 1 into bf16 before it waits for P(n)."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from mla_kernels.decode.hopper.convert import widen
from mla_kernels.decode.hopper.layouts import BLOCK, HALF, OUTPUT, PASS_64
from mla_kernels.decode.hopper.stream import ring_next, ring_step
from mla_kernels.layouts import Fp8DsMlaLayout
from mla_kernels.sparse.hopper.gather import (
    count_tiles,
    gather,
    load_slots,
    program_rows,
    program_token,
    slot_rows,
    store_offsets,
)
from mla_kernels.sparse.hopper.layouts import GATHER_CODES, GATHER_ROPE, GATHER_SCALES
from mla_kernels.sparse.hopper.values import add_values, store_output
from mla_kernels.triton_common.gluon_compat import aggregate, cta_barrier

SCALE_COL = gl.constexpr(Fp8DsMlaLayout().scale_offset // 4)
ROPE_COL = gl.constexpr(Fp8DsMlaLayout().rope_offset // 2)
GROUP = gl.constexpr(Fp8DsMlaLayout().group_size)


@aggregate
class Codes:
    """One warpgroup's half of a tile on its way to bf16.

    kv, kv_scale, kv_rope   the cache as uint8, fp32 and bf16
    codes, scales           [64, 256] uint8 and [64, 4] fp32, where the copies land
    tiles, full             [2, 64, 256] bf16 and the barriers that say they may be read
    rope, offsets, full_v   [SLOTS_R, 64, 64] bf16, [SLOTS_R, 64] fp32: of the second half only
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
    full_v: gl.shared_memory_descriptor
    COL: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self, kv, kv_scale, kv_rope, codes, scales, tiles, full, rope, offsets, full_v, COL
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
        self.full_v = full_v
        self.COL = gl.constexpr(COL)


@gluon.jit
def gather_codes(c, rows, slot, ir):
    """Start copying a tile; its rope columns straight to slot `ir` of their ring."""
    row, ok = slot_rows(rows, slot)
    gather(c.codes, c.kv, row, ok, c.COL, GATHER_CODES)
    gather(c.scales, c.kv_scale, row // 4, ok, SCALE_COL, GATHER_SCALES)
    if c.COL > 0:
        store_offsets(c.offsets.index(ir), ok)
        gather(c.rope.index(ir), c.kv_rope, row // 2, ok, ROPE_COL, GATHER_ROPE)
    async_copy.commit_group()
    if c.COL > 0:
        cta_barrier()
        mbarrier.arrive(c.full_v.index(ir), count=1)


@gluon.jit
def convert(c, iv):
    """The tile that was gathered last, to bf16 in slot `iv`."""
    async_copy.wait_group(0)
    tile = c.tiles.index(iv)
    for j in gl.static_range(HALF // 64):
        scale = c.scales.slice((c.COL + j * 64) // GROUP, 1, dim=1).load(PASS_64)
        codes = c.codes.slice(j * 64, 64, dim=1).load(PASS_64)
        tile.slice(j * 64, 64, dim=1).store(widen(codes, scale))
    fence_async_shared()
    mbarrier.arrive(c.full.index(iv), count=1)


@gluon.jit
def values_fp8_warpgroup(
    out, part_acc, kv, kv_scale, kv_rope, slots, slots_stride, lengths, K,
    span, num_slots, page_stride, num_heads, tiles, full, codes, scales, ring_r, offsets, full_v,
    full_q, p_ring, full_p, empty_p, factors, inverse, full_out,
    COL: gl.constexpr, SLOTS_R: gl.constexpr, SLOTS_P: gl.constexpr,
    PAGE: gl.constexpr, ROW: gl.constexpr, HAS_LENGTHS: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    token, first_head = program_token(num_heads)
    rows = program_rows(
        slots, slots_stride, lengths, K, span, token, num_slots, page_stride, PAGE, ROW, HAS_LENGTHS
    )
    c = Codes(kv, kv_scale, kv_rope, codes, scales, tiles, full, ring_r, offsets, full_v, COL)
    gather_codes(c, rows, load_slots(rows, 0, GATHER_CODES), 0)
    slot = load_slots(rows, 1, GATHER_CODES)
    tiles_of_range = count_tiles(rows)
    convert(c, 0)
    gather_codes(c, rows, slot, 1)
    slot = load_slots(rows, 2, GATHER_CODES)
    mbarrier.wait(full_q, 0)
    iv = gl.to_tensor(0)
    ir = gl.to_tensor(2)
    ip = gl.to_tensor(0)
    pp = gl.to_tensor(0)
    acc = gl.zeros([BLOCK, HALF], gl.float32, OUTPUT)
    for n in range(tiles_of_range - 1):
        convert(c, iv ^ 1)
        gather_codes(c, rows, slot, ir)
        slot = load_slots(rows, n + 3, GATHER_CODES)
        mbarrier.wait(full_p.index(ip), pp)
        acc = add_values(acc, p_ring, tiles.index(iv), factors, empty_p, ip)
        iv = iv ^ 1
        ir = ring_step(ir, SLOTS_R)
        ip, pp = ring_next(ip, pp, SLOTS_P)
    async_copy.wait_group(0)
    mbarrier.wait(full_p.index(ip), pp)
    acc = add_values(acc, p_ring, tiles.index(iv), factors, empty_p, ip)
    store_output(acc, out, part_acc, inverse, full_out, token, first_head, num_heads, COL, SPLIT)
