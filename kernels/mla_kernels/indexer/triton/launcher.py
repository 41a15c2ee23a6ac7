# SPDX-License-Identifier: Apache-2.0
"""Launches the score kernel. Arguments are checked by the public functions."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from mla_kernels.arch import AMD, MAX_REGISTERS_PER_THREAD, Arch, device_arch
from mla_kernels.indexer.triton.scores import scores_kernel
from mla_kernels.layouts import BLOCK_SIZE
from mla_kernels.triton_common.launch import launch
from mla_kernels.triton_common.runtime import INTERPRET

# Pages of keys in flight in one program.
PAGES_IN_FLIGHT = 3
# Tiles that a program counts the pages of: few numbers, as each is a specialisation.
TILE_COUNTS = (16, 128, 1024)
# Above this many tiles each gets a program of its own: they fill the device without splitting.
MAX_SPLIT_TILES = TILE_COUNTS[-1]
PROGRAMS_PER_SM = 3
# Stands for the CPU: room for any tile.
INTERPRETED = Arch(0, 2**20, 2**20, "mma", False, False)


@dataclass(frozen=True)
class ScoreTiles:
    """Tile of the score kernel.

    rows       query rows that share a page of keys
    num_warps  4 as long as the accumulator (64 tokens x heads of the rows) fits their registers
    stages     of the software pipeline; the block table is read half of them ahead of the keys
    maxnreg    registers a thread, where the assembler would rather spill one than use them
    """

    rows: int
    num_warps: int
    stages: int
    maxnreg: int | None

    @property
    def options(self) -> dict[str, int | None]:
        return {"num_warps": self.num_warps, "maxnreg": self.maxnreg}


def score_tiles(arch: Arch, rows: int, heads: int, D: int, key_bytes: int) -> ScoreTiles:
    """The largest tile of at most `rows` rows that fits the arch's shared memory."""
    # Decoding e4m3 by integer operations takes the registers of the wider tiles.
    rows = min(triton.next_power_of_2(rows), 4 if arch.e4m3_convert else 2)
    padded = padded_heads(heads)
    while rows > 1 and (
        rows * padded > 256
        or 2 * rows * padded * D + PAGES_IN_FLIGHT * BLOCK_SIZE * (D * key_bytes + 8)
        > arch.shared_memory
    ):
        rows //= 2
    narrow = 128 if arch.tensor_core in ("wgmma", "tcgen05") else 64
    num_warps = 4 if rows * padded <= narrow else 8
    maxnreg = None if arch.e4m3_convert else MAX_REGISTERS_PER_THREAD
    pages = 1 if arch == AMD and key_bytes > 1 else PAGES_IN_FLIGHT  # its 64 KB hold no more
    return ScoreTiles(rows, num_warps, 2 * pages + 2, maxnreg)


def padded_heads(heads: int) -> int:
    return max(triton.next_power_of_2(heads), 16)


@cache
def num_programs(device: torch.device) -> int:
    """Programs that the pages are dealt out to."""
    if device.type == "cpu":
        return 5
    return PROGRAMS_PER_SM * torch.cuda.get_device_properties(device).multi_processor_count


def tiles_of_call(
    q: torch.Tensor, k_cache: torch.Tensor, B: int, *, ragged: bool, deterministic: bool
) -> ScoreTiles:
    """The tile for T rows q of B requests, on which the bits of a sum over the heads depend: by its
    rows the compiler lays the heads out over threads. deterministic: a tile a row, always."""
    T, H, D = q.shape
    arch = INTERPRETED if INTERPRET else device_arch(q.device)
    if deterministic:
        shared_rows = 1
    elif ragged:  # rows are taken one by one unless there are clearly several of each request
        shared_rows = 4 if T > 4 * B else 1
    else:
        shared_rows = T // max(B, 1)
    return score_tiles(arch, shared_rows, H, D, k_cache.element_size())


def launch_scores(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    weights: torch.Tensor,
    block_table: torch.Tensor,
    lengths: torch.Tensor,
    scores: torch.Tensor,
    *,
    tiles: ScoreTiles,
    request_ids: torch.Tensor | None = None,
) -> None:
    """scores [T, 64 * max_blocks], written up to the end of each row's last page.

    `tiles`: those of a whole call (`tiles_of_call`), of which these rows are a part.
    """
    T, H, D = q.shape
    B, max_blocks = block_table.shape
    if T == 0 or max_blocks == 0:
        return
    arch = INTERPRETED if INTERPRET else device_arch(q.device)
    q_fp8 = q.dtype == torch.float8_e4m3fn
    k_fp8 = k_cache.dtype == torch.uint8
    ragged = request_ids is not None
    rows_per_request = 1 if ragged else T // B
    num_tiles = triton.cdiv(T, tiles.rows) if ragged else B * triton.cdiv(T // B, tiles.rows)
    programs = num_programs(q.device) if num_tiles <= MAX_SPLIT_TILES else num_tiles
    launch(
        scores_kernel,
        (programs,),
        q.view(torch.uint8) if q_fp8 else q,
        k_cache,
        weights,
        block_table,
        request_ids,
        lengths,
        scores,
        num_tiles,
        T,
        rows_per_request,
        max_blocks * BLOCK_SIZE,
        q.stride(0),
        q.stride(1),
        k_cache.stride(0),
        weights.stride(0),
        block_table.stride(0),
        scores.stride(0),
        **score_constants(
            tiles,
            H,
            D,
            num_tiles=num_tiles,
            ragged=ragged,
            q_fp8=q_fp8,
            k_fp8=k_fp8,
            fp8_hardware=arch.e4m3_convert,
        ),
        **tiles.options,
    )


def score_constants(
    tiles: ScoreTiles,
    heads: int,
    D: int,
    *,
    num_tiles: int,
    ragged: bool,
    q_fp8: bool,
    k_fp8: bool,
    fp8_hardware: bool,
) -> dict[str, Any]:
    """Compile-time arguments of the score kernel."""
    split = num_tiles <= MAX_SPLIT_TILES
    return {
        "H": heads,
        "D": D,
        "HEADS": padded_heads(heads),
        "ROWS": tiles.rows,
        "TILES": next(n for n in TILE_COUNTS if n >= num_tiles) if split else 1,
        "SPLIT": split,
        "RAGGED": ragged,
        "Q_FP8": q_fp8,
        "K_FP8": k_fp8,
        "DOT": dot_dtype(q_fp8, k_fp8),
        "FP8_HARDWARE": fp8_hardware,
        "UPCAST": INTERPRET,
        "STAGES": tiles.stages,
    }


def dot_dtype(q_fp8: bool, k_fp8: bool) -> tl.dtype:
    """Operand type of the matmul: fp16 holds every e4m3 value and is one instruction away."""
    return tl.float16 if q_fp8 and k_fp8 else tl.bfloat16
