# SPDX-License-Identifier: Apache-2.0
"""Workspace of `indexer_topk`: the scores of some rows and what their top-k needs."""

import torch

from mla_kernels import checks
from mla_kernels.layouts import BLOCK_SIZE
from mla_kernels.topk.plan import workspace_words

# Largest workspace that is allocated on its own: 1024 rows of 64K, 512 of 128K.
MAX_WORKSPACE_BYTES = 320 * 2**20


def row_words(max_blocks: int) -> int:
    """4-byte words of workspace a row: the scores, then the workspace of the top-k."""
    width = max_blocks * BLOCK_SIZE
    return width + workspace_words(width)


def indexer_topk_workspace(rows: int, max_blocks: int, device: torch.device) -> torch.Tensor:
    """Workspace of `indexer_topk` for that many rows and a block table of that width.

    At most MAX_WORKSPACE_BYTES (unless one row takes more): more rows are taken in turns.
    ValueError for a negative size.
    """
    checks.check_range("rows", rows, 0, 2**31 - 1)
    checks.check_range("max_blocks", max_blocks, 0, 2**31 - 1)
    words = row_words(max_blocks)
    rows = min(rows, max(MAX_WORKSPACE_BYTES // (4 * words), 1))
    return torch.empty(4 * rows * words, dtype=torch.uint8, device=device)
