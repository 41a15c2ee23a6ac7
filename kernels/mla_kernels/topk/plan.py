# SPDX-License-Identifier: Apache-2.0
"""Shapes of the tournament that selects the top-k: tiles by row width, levels, workspace.

Pure Python, so that a caller can size its buffers without Triton.
"""

from dataclasses import dataclass

import torch

from mla_kernels.checks import check_range

# Scores under one parent: a parent stands for the largest of its GROUP children.
GROUP = 8
# Keys that one program holds in registers: the widest row taken in one round.
MAX_TOP = 16384
MAX_WIDTH = MAX_TOP * GROUP**2
# Keys a program where several share a row; the words of state of such a row: counts of three
# digits, and one word for each program.
SPREAD_CHUNKS = (2048, 4096, 8192, 16384)
SPREAD_DIGITS = 2048
SPREAD_PARTS = 256
SPREAD_WORDS = 3 * SPREAD_DIGITS + SPREAD_PARTS
# Scores that a program of many holds: at least 2 MAX_K. And of what a word of its bitmap tells.
LIST_ROOM = 4096
BITMAP_WORD = 32
# Candidates of all ranks that one program merges.
MAX_MERGED = 16384


@dataclass(frozen=True)
class TopkTiles:
    """How rows of one width are selected.

    levels     levels above the row (0: the row is held as a whole)
    top        rows no longer than that take one round
    tile       keys that a program holds in a round
    num_warps  of the select kernel
    """

    levels: int
    top: int
    tile: int
    num_warps: int


def topk_tiles(width: int, k: int) -> TopkTiles:
    """The tiles for rows of `width` scores. ValueError above 2^20."""
    if width > MAX_WIDTH:
        raise ValueError(f"Expected rows of at most {MAX_WIDTH} scores, got {width}")
    levels, top = 0, width
    while top > MAX_TOP:
        levels, top = levels + 1, cdiv(top, GROUP)
    top = max(next_power_of_2(top), 128)
    tile = max(top, next_power_of_2(k) * GROUP) if levels else top
    # 32 keys a thread; never more threads than keys, which would count some of them twice.
    return TopkTiles(levels, top, tile, max(tile // 1024, 4))


def spread_chunk(rows: int, width: int, programs: int) -> int | None:
    """Keys a program if every row is shared by several of `programs` at most; None: too many."""
    fitting = [chunk for chunk in SPREAD_CHUNKS if rows * cdiv(width, chunk) <= programs]
    # Up to a warp of programs, where they allow it: more wait longer for each other than they save.
    few = [chunk for chunk in fitting if cdiv(width, chunk) <= 32]
    chunk = min(few or fitting, default=None)
    return chunk if chunk is not None and cdiv(width, chunk) <= SPREAD_PARTS else None


def level_widths(width: int) -> tuple[int, int]:
    """Entries of a row of levels 1 and 2, padded to 64 bytes."""
    level1 = cdiv(width, GROUP)
    level2 = cdiv(level1, GROUP)
    return 16 * cdiv(level1, 16), 16 * cdiv(level2, 16)


def workspace_words(width: int) -> int:
    """Words of workspace a row: the two upper levels, what its programs share, or a list and a
    bitmap."""
    return max(sum(level_widths(width)), SPREAD_WORDS, LIST_ROOM + bitmap_words(width))


def bitmap_words(width: int) -> int:
    """Words of bitmap a row, which is written for LIST_ROOM scores at a time."""
    return cdiv(width, LIST_ROOM) * (LIST_ROOM // BITMAP_WORD)


def exact_topk_workspace(rows: int, width: int, device: torch.device) -> torch.Tensor:
    """Workspace of `exact_topk` for [rows, width] scores, flat int32. ValueError for a negative
    size and for rows of more than 2^20 scores."""
    check_range("rows", rows, 0, 2**31 - 1)
    check_range("width", width, 0, MAX_WIDTH)
    return torch.empty(rows * workspace_words(width), dtype=torch.int32, device=device)


def level_views(
    workspace: torch.Tensor, rows: int, width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Levels 1 and 2 of `rows` rows in a workspace. ValueError if it is too small."""
    widths = level_widths(width)
    words = leading_words(workspace, rows * sum(widths))
    level1, level2 = words.split([rows * w for w in widths])
    return level1.view(rows, widths[0]), level2.view(rows, widths[1])


def list_views(workspace: torch.Tensor, rows: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """List and bitmap of `rows` rows in a workspace. ValueError if it is too small."""
    sizes = LIST_ROOM, bitmap_words(width)
    words = leading_words(workspace, rows * sum(sizes))
    lists, bitmaps = words.split([rows * size for size in sizes])
    return lists.view(rows, sizes[0]), bitmaps.view(rows, sizes[1])


def state_view(workspace: torch.Tensor, rows: int) -> torch.Tensor:
    """What the programs of each of `rows` rows share. ValueError if the workspace is too small."""
    return leading_words(workspace, rows * SPREAD_WORDS).view(rows, SPREAD_WORDS)


def leading_words(workspace: torch.Tensor, needed: int) -> torch.Tensor:
    """The first `needed` words of an int32 workspace. ValueError if it has fewer."""
    if workspace.numel() < needed:
        raise ValueError(f"Expected a workspace of {needed} int32, got {workspace.numel()}")
    return workspace.flatten()[:needed]


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()
