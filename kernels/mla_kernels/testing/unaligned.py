# SPDX-License-Identifier: Apache-2.0
"""Caches whose rows do not start where a GPU would like them to."""

import torch


def unaligned(cache: torch.Tensor, align: int) -> torch.Tensor:
    """A copy of a cache [pages, block, width] among NaN: its address, page stride and row stride
    are multiples of `align` bytes, below 16, and of no larger power of two; no row could be closer
    to the next (`row_stride` in decode/triton/specs.py)."""
    pages, block, width = cache.shape
    size = cache.element_size()
    step, row = align // size, (-(-width * size // align) | 1) * align // size
    page = block * row + step
    memory = torch.full(((pages * page + step) * size,), 0xFF, dtype=torch.uint8)
    memory = memory.to(cache.device).view(cache.dtype)
    return memory.as_strided(cache.shape, (page, row, 1), step).copy_(cache)
