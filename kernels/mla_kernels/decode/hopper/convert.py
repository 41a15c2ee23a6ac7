# SPDX-License-Identifier: Apache-2.0
"""The tile stream of an fp8 cache: e4m3 codes land in rings of their own and become bf16 tiles."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.experimental.gluon.language.nvidia.hopper.tma import tensor_descriptor

from mla_kernels.decode.hopper.layouts import BLOCK, PASS_64, SCALES_READ
from mla_kernels.decode.hopper.stream import Cursor, next_segment, ring_next
from mla_kernels.layouts import Fp8DsMlaLayout
from mla_kernels.triton_common.dequantize import SCALED_BF16, SCALED_REGS
from mla_kernels.triton_common.gluon_compat import aggregate, reinterpret, tma_load

# The first fp32 column of an fp8_ds_mla row's scales. A TMA load starts at a multiple of 16 bytes
# ("illegal instruction" otherwise), so both halves of a row load all four.
SCALE_COL = gl.constexpr(Fp8DsMlaLayout().scale_offset // 4)


@aggregate
class Codes:
    """Columns [COL, COL + WIDTH) of the cache rows, as codes.

    codes   [SLOTS, 64, WIDTH] uint8; `landed` says that a tile and its scales have landed
    scales  [SLOTS, 64, 4] fp32, if GROUPED: the scales of a row's four groups
    scale   fp32, the scale of all codes, if not GROUPED
    tiles   [2, 64, WIDTH] bf16, what the codes become; `full` says that warpgroup 0 may read it
    """

    codes: gl.shared_memory_descriptor
    landed: gl.shared_memory_descriptor
    scales: gl.shared_memory_descriptor
    tiles: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    code_desc: tensor_descriptor
    scale_desc: tensor_descriptor
    scale: gl.tensor
    COL: gl.constexpr
    WIDTH: gl.constexpr
    SLOTS: gl.constexpr
    GROUPED: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self, codes, landed, scales, tiles, full, code_desc, scale_desc, scale,
        COL, WIDTH, SLOTS, GROUPED,
    ):  # fmt: skip
        self.codes = codes
        self.landed = landed
        self.scales = scales
        self.tiles = tiles
        self.full = full
        self.code_desc = code_desc
        self.scale_desc = scale_desc
        self.scale = scale
        self.COL = gl.constexpr(COL)
        self.WIDTH = gl.constexpr(WIDTH)
        self.SLOTS = gl.constexpr(SLOTS)
        self.GROUPED = gl.constexpr(GROUPED)


@gluon.jit
def page_of(plan, request, tile):
    row = plan.table + gl.minimum(request, plan.last).to(gl.int64) * plan.table_stride
    return gl.load(row + tile)


@gluon.jit
def code_stream(plan, request, lo, hi, end):
    """The cursor at the first tile; unlike that of `stream_start` it passes no query tiles."""
    page = page_of(plan, request, lo)
    return Cursor(request + 0, lo + 0, hi + 0, end + 0, lo * 0 - 1, page)


@gluon.jit
def load_codes(c, plan, r, slot):
    """Fill `slot` of the ring of codes with the cursor's tile, and step on."""
    ok = c.request <= plan.last
    row = c.page * BLOCK
    landed = r.landed.index(slot)
    mbarrier.expect(landed, BLOCK * (r.WIDTH + 16 * r.GROUPED), pred=ok)
    tma_load(r.code_desc, [row, r.COL], landed, r.codes.index(slot), pred=ok)
    if r.GROUPED:
        tma_load(r.scale_desc, [row, SCALE_COL], landed, r.scales.index(slot), pred=ok)
    request = c.request
    tile = c.tile + 1
    hi = c.hi
    end = c.end
    if tile >= hi:
        request, lo, hi, end = next_segment(plan, request, hi, end)
        tile = lo + 0
    return Cursor(request, tile, hi, end, c.query, page_of(plan, request, tile))


@gluon.jit
def widen(codes, scale):
    """uint8 codes times fp32 scales, rounded once to bf16."""
    codes, scale = gl.broadcast(codes, scale)
    return gl.inline_asm_elementwise(
        SCALED_BF16, SCALED_REGS, [codes, scale], dtype=gl.bfloat16, is_pure=True, pack=4
    )


@gluon.jit
def convert_next(c, plan, r, ic, pc, slot):
    """Turn the next codes into the bf16 tile `slot`, hand it to warpgroup 0, load more codes."""
    mbarrier.wait(r.landed.index(ic), pc)
    codes = r.codes.index(ic)
    tile = r.tiles.index(slot)
    for j in gl.static_range(r.WIDTH // 64):
        if r.GROUPED:
            scales = reinterpret(r.scales.index(ic), gl.float32, [BLOCK, 4], SCALES_READ)
            scale = scales.slice((r.COL + j * 64) // 128, 1, dim=1).load(PASS_64)
        else:
            scale = r.scale
        tile.slice(j * 64, 64, dim=1).store(
            widen(codes.slice(j * 64, 64, dim=1).load(PASS_64), scale)
        )
    fence_async_shared()
    mbarrier.arrive(r.full.index(slot), count=1)
    c = load_codes(c, plan, r, ic)
    ic, pc = ring_next(ic, pc, r.SLOTS)
    return c, ic, pc
