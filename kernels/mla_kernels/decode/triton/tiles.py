# SPDX-License-Identifier: Apache-2.0
"""Which tile the decode kernel uses: by rows, cache format and what the GPU offers."""

from dataclasses import dataclass

from mla_kernels.arch import KB, Arch
from mla_kernels.decode.triton.few_rows.tiles import choose_few_rows
from mla_kernels.layouts import BLOCK_SIZE, MlaDims


@dataclass(frozen=True)
class Tile:
    """One specialisation of the decode kernel.

    rows        query rows (s_q * H) of a program
    tokens      cache rows of one step
    warps, stages, max_registers   as Triton's num_warps, num_stages, maxnreg
    order       "rows" or "tokens" on the M side of the dots (tile_step.py)
    wgmma       the dots will be wgmma (Hopper, 64 or more on the M side)
    lazy_branch skip the rescale of O when no row of the tile needs it (else multiply by 1)
    carry       load the next tile to registers before the dots, not to shared memory
    prefetch    ask for the tile so many steps ahead to be in the L2 (sm_90 and newer)
    """

    rows: int
    tokens: int
    warps: int
    stages: int
    max_registers: int = 255
    order: str = "rows"
    wgmma: bool = False
    lazy_branch: bool = False
    carry: bool = False
    prefetch: int = 0


def tile_rows(rows: int, arch: Arch) -> int:
    """Rows of a program's tile: few heads are not padded to 64. With mma q lies in registers, and
    64 rows of it would spill."""
    if rows <= 16:
        return 16
    return 32 if rows <= 32 or arch.tensor_core != "wgmma" else 64


def ctas_per_sm(rows: int, arch: Arch, kv_format: str = "float") -> int:
    """Programs that share an SM, which is how many parts the plan makes."""
    few_rows = choose_few_rows(tile_rows(rows, arch), MlaDims(), kv_format, arch)
    if few_rows is not None:
        # few_rows_fp8, which takes nearly all fp8 caches on sm_90, fills an SM with one.
        return 1 if arch.sm == 90 and kv_format == "fp8" else few_rows.ctas
    tile = choose_tile(rows, MlaDims(), kv_format, arch)
    return 2 if tile.warps == 4 else 1


def choose_tile(
    rows: int,
    dims: MlaDims,
    kv_format: str,
    arch: Arch,
    rescale: str = "pow2",
    block_size: int = BLOCK_SIZE,
    aligned: bool = True,
) -> Tile:
    """The tile for `rows` query rows; it has at least tile_rows(rows, arch) rows. `aligned`: cache
    rows start at multiples of 16 bytes."""
    m = tile_rows(rows, arch)
    if not aligned:
        return _unaligned_tile(m, kv_format, arch)
    if arch.tensor_core == "wgmma":
        return _hopper_tile(m, dims, kv_format, rescale, block_size)
    if arch.tensor_core == "mfma":
        # Compiled only: four warps have 512 registers a lane; more warps, tokens or stages spill.
        tokens = 32 if m == 16 else 16
        return Tile(m, tokens, warps=4, stages=1, carry=kv_format != "float")
    large = arch.shared_memory > 128 * KB
    if kv_format != "float":
        return Tile(m, 32, warps=8, stages=1, carry=True)
    if m == 32:
        return Tile(32, 32, warps=8, stages=5 if large else 4)
    return Tile(16, 32, warps=8, stages=7 if large else 4)


def _unaligned_tile(m: int, kv_format: str, arch: Arch) -> Tile:
    """Rows that start anywhere come to registers a few bytes at a time, where more tokens than
    these spill. No L2 prefetch, which wants multiples of 16 bytes. No tokens on wgmma's M side:
    without asynchronous copies K's rope part and P, both operands of wgmma, would share a place
    (kv_tile.in_registers), while P of rows comes from registers."""
    wgmma = m == 64
    warps = 4 if arch.tensor_core == "mfma" else 8
    return Tile(m, 16, warps, stages=1, wgmma=wgmma, carry=kv_format != "float" and not wgmma)


def _hopper_tile(m: int, dims: MlaDims, kv_format: str, rescale: str, block_size: int) -> Tile:
    """Measured on an H200: benchmarks/versions/decode_triton.md. What many_rows takes (16-bit
    caches, more than 16 rows, pages of 64 tokens) does not come here."""
    if m == 16 and kv_format == "float":
        return Tile(16, 64, warps=8, stages=5)
    if m == 16:
        # With 4 warps the addresses of two pages, or two scales of a short row, make it spill.
        two_scales = kv_format == "fp8_ds_mla" and dims.kv_lora_rank == 256
        warps = 8 if block_size % 32 or two_scales else 4
        return Tile(16, 32, warps=warps, stages=1, carry=True, prefetch=2)
    if m == 32 and kv_format == "float":
        return Tile(32, 64, warps=8, stages=2, order="tokens", wgmma=True, prefetch=1)
    if m == 32 and kv_format == "fp8":
        return Tile(32, 64, warps=8, stages=1, order="tokens", wgmma=True, carry=True, prefetch=1)
    # Also 32 rows of fp8_ds_mla: its conversion leaves no registers for the tile above.
    if rescale == "amla":
        return Tile(64, 32, warps=8, stages=3, wgmma=True)
    stages = 2 if dims.kv_lora_rank > 256 else 3
    return Tile(64, 64, warps=8, stages=stages, wgmma=True, prefetch=1)
