# SPDX-License-Identifier: Apache-2.0
"""Which batches the few-rows sparse kernel takes, and with what tile."""

import torch

from mla_kernels.arch import KB, Arch
from mla_kernels.decode.triton.few_rows.tiles import FewRowsTile
from mla_kernels.layouts import MlaDims

ROWS = 16


def few_rows_tile(arch: Arch) -> FewRowsTile | None:
    """The tile for 16 heads; None without e4m3 instructions."""
    if arch.tensor_core == "mfma" or not arch.e4m3_convert:
        return None
    large = arch.shared_memory > 128 * KB
    return FewRowsTile(ROWS, 64, 8, 2, 2) if large else FewRowsTile(ROWS, 32, 8, 1, 3)


def choose_few_rows(
    heads: int, dims: MlaDims, kv_format: str, arch: Arch, dtype: torch.dtype = torch.bfloat16
) -> FewRowsTile | None:
    """The tile where this kernel is taken, else None. 32 heads are two tiles: one of 32 rows was
    faster for many tokens, but not as fast as the Hopper kernel (row 14 of
    benchmarks/versions/sparse.md)."""
    shape = dims == MlaDims() and dtype == torch.bfloat16 and kv_format == "fp8_ds_mla"
    return few_rows_tile(arch) if shape and heads <= 2 * ROWS else None
