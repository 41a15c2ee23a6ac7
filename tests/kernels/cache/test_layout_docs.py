# SPDX-License-Identifier: Apache-2.0
"""docs/cache_layouts.md says what layouts.py says."""

import re
from pathlib import Path

import pytest
import torch
from mla_kernels.layouts import BLOCK_SIZE, MIN_GROUP_SCALE, Fp8DsMlaLayout, IndexerLayout, MlaDims

PAGE = (Path(__file__).parents[3] / "docs" / "cache_layouts.md").read_text()
DIMS = MlaDims()


def table(heading):
    """The cells of the first table under a heading, without its head."""
    section = PAGE.split(f"## {heading}\n")[1].split("\n## ")[0]
    rows = [line.strip("| ").split("|") for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in rows[2:]]


def span(first, size):
    return f"{first}..{first + size - 1}"


@pytest.mark.parametrize(("name", "row", "latent", "rope"), table("Dense rows"))
def test_dense_rows(name, row, latent, rope):
    size = getattr(torch, name).itemsize
    assert int(row) == size * DIMS.head_dim
    assert latent == span(0, size * DIMS.kv_lora_rank)
    assert rope == span(size * DIMS.kv_lora_rank, size * DIMS.rope_dim)


def test_fp8_ds_mla_rows():
    layout = Fp8DsMlaLayout()
    assert f"[num_blocks, block_size, {layout.row_bytes}]" in PAGE
    assert table("fp8_ds_mla rows") == [
        [span(0, DIMS.kv_lora_rank), "latent", f"{DIMS.kv_lora_rank} float8_e4m3fn"],
        [
            span(layout.scale_offset, 4 * layout.num_groups),
            "scales",
            f"{layout.num_groups} float32, scale g belongs to latent elements "
            f"{layout.group_size} g .. {layout.group_size} g + {layout.group_size - 1}",
        ],
        [
            span(layout.rope_offset, 2 * DIMS.rope_dim),
            "rope",
            f"{DIMS.rope_dim} bfloat16, not quantised",
        ],
    ]
    assert float(re.search(r"at least 2\^(-\d+)", PAGE)[1]) == torch.tensor(MIN_GROUP_SCALE).log2()


def test_indexer_pages():
    layout = IndexerLayout()
    row = layout.page_bytes // BLOCK_SIZE
    assert f"[num_blocks, {BLOCK_SIZE}, {row}]" in PAGE
    assert f"a page of {layout.page_bytes} bytes" in PAGE
    assert table("Lightning Indexer pages") == [
        [
            span(0, layout.scale_offset),
            "keys",
            f"token t at {layout.head_dim} t: {layout.head_dim} float8_e4m3fn",
        ],
        [
            span(layout.scale_offset, 4 * BLOCK_SIZE),
            "scales",
            f"token t at {layout.scale_offset} + 4 t: 1 float32",
        ],
    ]
