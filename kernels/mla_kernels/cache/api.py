# SPDX-License-Identifier: Apache-2.0
"""The public function `write_kv_cache`."""

import torch

from mla_kernels import checks
from mla_kernels.layouts import MlaDims


def write_kv_cache(
    kv_c: torch.Tensor,
    k_pe: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    kv_scale: float | torch.Tensor | None = None,
    impl: str = "auto",
) -> None:
    """Write the rows of new tokens into the paged cache, in place; slot -1 is skipped."""
    checks.check_kv_cache(kv_cache, MlaDims(kv_c.shape[-1], k_pe.shape[-1]), kv_scale)
    keep = slot_mapping >= 0
    slots = slot_mapping[keep].long()
    rows = torch.cat([kv_c[: len(keep)][keep], k_pe[: len(keep)][keep]], -1)
    block = kv_cache.shape[1]
    kv_cache[slots // block, slots % block] = rows.to(kv_cache.dtype)
