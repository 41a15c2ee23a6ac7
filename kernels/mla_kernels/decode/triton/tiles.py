# SPDX-License-Identifier: Apache-2.0
"""Which tile the decode kernel uses: by rows, cache format and what the GPU offers."""

from dataclasses import dataclass

from mla_kernels.arch import KB, Arch
from mla_kernels.layouts import MlaDims


@dataclass(frozen=True)
class Tile:
    """One specialisation of the decode kernel.

    rows        query rows (s_q * H) of a program
    tokens      cache rows of one step
    warps, stages, max_registers   as Triton's num_warps, num_stages, maxnreg
    order       "rows" or "tokens" on the M side of the dots (tile_step.py)
    wgmma       the dots will be wgmma (Hopper, 64 or more on the M side)
    lazy_branch skip the rescale of O when no row of the tile needs it (else multiply by 1)
    """

    rows: int
    tokens: int
    warps: int
    stages: int
    max_registers: int = 255
    order: str = "rows"
    wgmma: bool = False
    lazy_branch: bool = False


def tile_rows(rows: int, arch: Arch) -> int:
    """Rows of a program's tile: few heads are not padded to 64, and q must fit in shared memory."""
    if rows <= 16:
        return 16
    if rows <= 32 or arch.shared_memory < 128 * KB:
        return 32
    return 64


def ctas_per_sm(rows: int, arch: Arch) -> int:
    """Programs that share an SM, which is how many parts the plan makes."""
    return 2 if tile_rows(rows, arch) == 16 and arch.shared_memory > 128 * KB else 1


def choose_tile(rows: int, dims: MlaDims, kv_format: str, arch: Arch) -> Tile:
    """The tile for `rows` query rows."""
    m = tile_rows(rows, arch)
    if m == 64 and arch.tensor_core == "wgmma":
        return Tile(64, 64, warps=8, stages=2, wgmma=True)
    if m == 64:
        return Tile(64, 32, warps=8, stages=2)
    if m == 32:
        return Tile(32, 32, warps=8, stages=3)
    if arch.shared_memory < 128 * KB:
        return Tile(16, 32, warps=8, stages=3)
    return Tile(16, 32, warps=4, stages=5)
