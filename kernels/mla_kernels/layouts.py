# SPDX-License-Identifier: Apache-2.0
"""Byte layouts of the paged caches: the one place that kernels, references and docs read.

Dense cache, one row a token, `[num_blocks, block_size, head_dim]`:

    latent (kv_lora_rank) | rope (head_dim - kv_lora_rank)        bf16, fp16, fp32 or float8_e4m3fn

`fp8_ds_mla` cache, `[num_blocks, block_size, row_bytes]` uint8, for kv_lora_rank 512 and rope 64:

    bytes   0..511   latent, float8_e4m3fn, one byte an element
    bytes 512..527   4 fp32 scales, one per 128 latent elements (value = e4m3 * scale)
    bytes 528..655   rope, 64 bf16, not quantised

Lightning Indexer cache, `[num_blocks, 64, 132]` uint8: within a page the 64 x 128 e4m3 bytes of all
tokens come first, then their 64 fp32 scales.
"""

from dataclasses import dataclass

BLOCK_SIZE = 64
E4M3_MAX = 448.0
# A group of zeros gets this scale instead of 0 (FLT_MIN, as vLLM's cache kernels do).
MIN_GROUP_SCALE = 2.0**-126
# The scale of an indexer key is never below this / 448, as in DeepSeek's and vLLM's kernels.
INDEXER_MIN_AMAX = 1e-4


@dataclass(frozen=True)
class MlaDims:
    """The two widths of an MLA cache row, in elements."""

    kv_lora_rank: int = 512
    rope_dim: int = 64

    @property
    def head_dim(self) -> int:
        """Width of a query or an unquantised cache row (Dk)."""
        return self.kv_lora_rank + self.rope_dim


@dataclass(frozen=True)
class Fp8DsMlaLayout:
    """Byte offsets within one `fp8_ds_mla` row (656 bytes for 512 + 64)."""

    dims: MlaDims = MlaDims()
    group_size: int = 128

    @property
    def num_groups(self) -> int:
        return self.dims.kv_lora_rank // self.group_size

    @property
    def scale_offset(self) -> int:
        return self.dims.kv_lora_rank

    @property
    def rope_offset(self) -> int:
        return self.scale_offset + 4 * self.num_groups

    @property
    def row_bytes(self) -> int:
        return self.rope_offset + 2 * self.dims.rope_dim


@dataclass(frozen=True)
class IndexerLayout:
    """Byte offsets within one page of the Lightning Indexer's fp8 cache."""

    head_dim: int = 128
    block_size: int = BLOCK_SIZE

    @property
    def scale_offset(self) -> int:
        return self.block_size * self.head_dim

    @property
    def page_bytes(self) -> int:
        return self.scale_offset + 4 * self.block_size
