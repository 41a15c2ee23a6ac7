# SPDX-License-Identifier: Apache-2.0
"""FlashMLA's caches as the ops take them, and its log-sum-exp."""

import torch

from mla_kernels import checks

PAGE = 16
PAGES = (64, 32, 16)  # of a cache with blocks of another size, the largest that fits


def as_blocks(kv_cache: torch.Tensor) -> torch.Tensor:
    """A cache of sparse decode, whose indices are numbers of rows, by a view in blocks of a size
    that the kernels have. ValueError if that would take a copy or other numbers."""
    num_blocks, block_size, width = kv_cache.shape
    if block_size in checks.BLOCK_SIZES:
        return kv_cache
    rows = num_blocks * block_size
    page = next((page for page in PAGES if rows % page == 0), None)
    adjacent = min(num_blocks, block_size) <= 1 or (
        kv_cache.stride(0) == block_size * kv_cache.stride(1)
    )
    if page is None or not adjacent:
        raise ValueError(
            f"Expected block size (k_cache.shape[1]) in {list(checks.BLOCK_SIZES)}, or blocks one "
            f"behind the other with a multiple of {PAGE} rows in all, got {num_blocks} blocks of "
            f"{block_size} with strides {kv_cache.stride()}"
        )
    return kv_cache.view(rows // page, page, width)


def as_pages(rows: torch.Tensor) -> torch.Tensor:
    """rows [n, Dk] as a paged cache of 16 rows a block: a view, or a padded copy if 16 does not
    divide n."""
    short = -rows.shape[0] % PAGE
    if short:
        rows = torch.nn.functional.pad(rows, (0, 0, 0, short))
    return rows.unflatten(0, (-1, PAGE))


def lonely_to_inf(lse: torch.Tensor) -> torch.Tensor:
    """FlashMLA's log-sum-exp of no key is +inf."""
    return lse.masked_fill(lse == -torch.inf, torch.inf)
