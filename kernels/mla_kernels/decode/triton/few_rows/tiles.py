# SPDX-License-Identifier: Apache-2.0
"""Which batches the few-rows kernel takes, and with what tile."""

from dataclasses import dataclass

import torch

from mla_kernels.arch import KB, Arch
from mla_kernels.layouts import BLOCK_SIZE, MlaDims

REGISTERS_PER_SM = 65536
WARP = 32


@dataclass(frozen=True)
class FewRowsTile:
    """One specialisation.

    rows, tokens   query rows of a program, cache rows of one step
    warps, ctas    warps of a program, programs that share an SM
    stages         tiles of the ring
    """

    rows: int
    tokens: int
    warps: int
    ctas: int
    stages: int

    @property
    def max_registers(self) -> int:
        return min(255, REGISTERS_PER_SM // (self.ctas * self.warps * WARP))


def few_rows_tile(rows: int, dims: MlaDims, kv_format: str, arch: Arch) -> FewRowsTile | None:
    """The tile for programs of `rows` query rows (tiles.tile_rows), None where there is none.

    Measured on an H200 (benchmarks/versions/decode_triton.md), where 16 rows of bf16 need no more
    than the kernel of decode/triton/kernel.py, and 32 rows of it go to many_rows unless strides
    keep TMA from them.
    """
    if rows > 32 or arch.tensor_core == "mfma":
        return None
    if kv_format == "float":
        return FewRowsTile(32, 64, 8, 1, 2) if rows == 32 and arch.sm == 90 else None
    if not arch.e4m3_convert or (kv_format == "fp8_ds_mla" and dims.kv_lora_rank != 512):
        return None
    large = arch.shared_memory > 128 * KB
    if rows == 16:
        return FewRowsTile(16, 64 if large else 32, 8, 2 if large else 1, 2)
    return FewRowsTile(32, 64, 8, 1, 3) if large else FewRowsTile(32, 32, 8, 1, 2)


def choose_few_rows(
    rows: int,
    dims: MlaDims,
    kv_format: str,
    arch: Arch,
    rescale: str = "pow2",
    block_size: int = BLOCK_SIZE,
    dtype: torch.dtype = torch.bfloat16,
) -> FewRowsTile | None:
    """The tile where this kernel is taken, else None.

    Only what has been compared with the definition on a GPU, of sm_90: other dims, block sizes and
    dtypes compile and have tests (tests/kernels/triton/test_few_rows.py). The tiles of 32 tokens,
    for GPUs with less shared memory (sm_89, sm_120), are taken too: they compile, and a test runs
    them on whatever GPU is there, but none of those GPUs has run them.
    """
    shape = dims == MlaDims(512, 64) and block_size == BLOCK_SIZE and dtype == torch.bfloat16
    if not shape or rescale != "pow2":
        return None
    return few_rows_tile(rows, dims, kv_format, arch)
