# SPDX-License-Identifier: Apache-2.0
"""Random inputs of the indexer: paged keys in a shuffled cache full of junk, queries, weights."""

from dataclasses import dataclass

import torch

from mla_kernels.indexer.cache import write_indexer_cache
from mla_kernels.layouts import BLOCK_SIZE, IndexerLayout

# Entries of a block table that nothing may follow.
UNUSED_PAGE = 2**30


@dataclass(frozen=True)
class IndexerCase:
    """Arguments of `indexer_scores` for requests of the given lengths."""

    q: torch.Tensor
    k_cache: torch.Tensor
    weights: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    positions: torch.Tensor | None = None
    request_ids: torch.Tensor | None = None

    @property
    def args(self) -> tuple[torch.Tensor, ...]:
        return self.q, self.k_cache, self.weights, self.block_table, self.seq_lens

    @property
    def rows(self) -> dict[str, torch.Tensor | None]:
        return {"positions": self.positions, "request_ids": self.request_ids}


def make_indexer_case(
    lengths: list[int],
    *,
    s_q: int = 1,
    chunks: list[int] | None = None,
    heads: int = 64,
    q_fp8: bool = True,
    k_fp8: bool = True,
    spare_blocks: int = 2,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> IndexerCase:
    """Requests of `lengths` keys with `s_q` rows each, or with the last chunks[b] tokens as rows.

    With chunks a padding row stands after every request's rows. The cache outside the keys is junk
    (every byte value, NaN in bf16), unused table entries point nowhere, and `spare_blocks` columns
    of the table are unused.
    """
    g = torch.Generator().manual_seed(seed)
    D = IndexerLayout().head_dim
    used = [-(-n // BLOCK_SIZE) for n in lengths]
    blocks = sum(used) + 3
    if k_fp8:
        k_cache = torch.randint(0, 256, (blocks, BLOCK_SIZE, D + 4), generator=g, dtype=torch.uint8)
    else:
        k_cache = torch.full((blocks, BLOCK_SIZE, D), float("nan"), dtype=torch.bfloat16)
    shape = (len(lengths), max(used, default=0) + spare_blocks)
    table = torch.full(shape, UNUSED_PAGE, dtype=torch.int32)
    pages = torch.randperm(blocks, generator=g).int().split([*used, 3])
    slots = [torch.empty(0, dtype=torch.int64)]
    for b, n in enumerate(lengths):
        table[b, : used[b]] = pages[b]
        position = torch.arange(n)
        page = table[b, position // BLOCK_SIZE].long()
        slots.append(page * BLOCK_SIZE + position % BLOCK_SIZE)
    keys = torch.randn(sum(lengths), D, generator=g)
    write_indexer_cache(keys, k_cache, torch.cat(slots), impl="torch")

    positions = request_ids = None
    T = s_q * len(lengths)
    if chunks is not None:
        row_position, row_request = [], []
        for b, (n, chunk) in enumerate(zip(lengths, chunks, strict=True)):
            row_position += [*range(n - chunk, n), -1]
            row_request += [b] * chunk + [-1]
        positions = torch.tensor(row_position, dtype=torch.int32)
        request_ids = torch.tensor(row_request, dtype=torch.int32)
        T = len(row_position)
    q = torch.randn(T, heads, D, generator=g)
    q = q.to(torch.float8_e4m3fn) if q_fp8 else q.bfloat16()
    weights = torch.randn(T, heads, generator=g)
    seq_lens = torch.tensor(lengths, dtype=torch.int32)
    tensors = (q, k_cache, weights, table, seq_lens, positions, request_ids)
    return IndexerCase(*(None if x is None else x.to(device) for x in tensors))  # type: ignore[arg-type]
