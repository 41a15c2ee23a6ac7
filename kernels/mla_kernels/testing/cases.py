# SPDX-License-Identifier: Apache-2.0
"""Decode cases for tests and benchmarks: a batch over a shuffled, poisoned paged cache."""

from dataclasses import dataclass, field
from typing import Any

import torch

from mla_kernels.cache.torch_impl import encode_rows
from mla_kernels.layouts import BLOCK_SIZE, MlaDims

# Entries of a block table past a request's end: reading one is an error that shows.
ABSURD_BLOCK = 2**30


@dataclass
class DecodeCase:
    """Arguments of `mla_decode`. `args` are positional, `options` by keyword."""

    q: torch.Tensor
    kv_cache: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def args(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.q, self.kv_cache, self.block_table, self.seq_lens

    def poisoned_out(self) -> torch.Tensor:
        """An output tensor full of NaN."""
        B, s_q, H, _ = self.q.shape
        return self.q.new_full((B, s_q, H, self.options["kv_lora_rank"]), torch.nan)


def random_tokens(
    lengths: list[int], dims: MlaDims, *, std: float = 1.0, seed: int = 0, device: str = "cpu"
) -> list[torch.Tensor]:
    """One fp32 tensor [length, head_dim] of keys for each request."""
    g = torch.Generator(device).manual_seed(seed)
    return [torch.randn(n, dims.head_dim, generator=g, device=device) * std for n in lengths]


def decode_case(
    lengths: list[int],
    *,
    num_heads: int = 16,
    s_q: int = 1,
    dims: MlaDims = MlaDims(),
    dtype: torch.dtype = torch.bfloat16,
    cache_dtype: torch.dtype | None = None,
    kv_scale: float | None = None,
    block_size: int = BLOCK_SIZE,
    max_blocks: int | None = None,
    q_std: float = 1.0,
    k_std: float = 1.0,
    junk: float = torch.nan,
    tokens: list[torch.Tensor] | None = None,
    q: torch.Tensor | None = None,
    scale: float | None = None,
    seed: int = 0,
    device: str = "cpu",
) -> DecodeCase:
    """A batch of requests of `lengths` tokens.

    Blocks lie in the cache in random order. Rows past a request's end, and whole unused blocks, are
    `junk` (NaN, or a large finite number; for fp8 the byte that decodes to NaN); unused table
    entries are out of range. `tokens` and `q` replace the random ones.
    """
    g = torch.Generator().manual_seed(seed + 1)
    B = len(lengths)
    tokens = tokens or random_tokens(lengths, dims, std=k_std, seed=seed, device=device)
    cache_dtype = cache_dtype or dtype
    blocks_of = [-(-n // block_size) for n in lengths]
    width = max_blocks if max_blocks is not None else max([1, *blocks_of]) + 1
    num_blocks = sum(blocks_of) + 3
    order = torch.randperm(num_blocks, generator=g).tolist()

    table = torch.full((B, width), ABSURD_BLOCK, dtype=torch.int32)
    cache = _poisoned_cache(num_blocks, block_size, dims, cache_dtype, junk, device)
    for b, n in enumerate(lengths):
        mine = [order.pop() for _ in range(blocks_of[b])]
        table[b, : len(mine)] = torch.tensor(mine, dtype=torch.int32)
        rows = encode_rows(
            tokens[b][:, : dims.kv_lora_rank].to(dtype),
            tokens[b][:, dims.kv_lora_rank :].to(dtype),
            cache_dtype,
            kv_scale,
        )
        for j, block in enumerate(mine):
            part = rows[j * block_size : min((j + 1) * block_size, n)]
            cache[block, : part.shape[0]] = part
    if q is None:
        gq = torch.Generator(device).manual_seed(seed + 2)
        q = torch.randn(B, s_q, num_heads, dims.head_dim, generator=gq, device=device) * q_std
    return DecodeCase(
        q.to(device, dtype),
        cache,
        table.to(device),
        torch.tensor(lengths, dtype=torch.int32, device=device),
        {
            "scale": dims.head_dim**-0.5 if scale is None else scale,
            "kv_lora_rank": dims.kv_lora_rank,
            "kv_scale": kv_scale,
        },
    )


def scales_to_powers_of_two(kv_cache: torch.Tensor) -> None:
    """Round the scales of an fp8_ds_mla cache of rank 512 in place; junk stays.

    The reference rounds code times scale to bf16, some kernels do not (docs/numerics.md): of powers
    of two there is nothing to round.
    """
    scales = kv_cache.view(torch.float32)[..., 128:132]
    scales.copy_(torch.where(scales < 1e3, scales.log2().round().exp2(), scales))


def _poisoned_cache(
    num_blocks: int,
    block_size: int,
    dims: MlaDims,
    dtype: torch.dtype,
    junk: float,
    device: str,
) -> torch.Tensor:
    row = encode_rows(torch.zeros(1, dims.kv_lora_rank), torch.zeros(1, dims.rope_dim), dtype, 1.0)
    cache = torch.empty(num_blocks, block_size, row.shape[1], dtype=dtype, device=device)
    if dtype in (torch.uint8, torch.float8_e4m3fn):
        # 0x7F is NaN as e4m3; four of them are a large fp32 number, two a NaN as bf16.
        cache.view(torch.uint8).fill_(0x7F)
        return cache
    return cache.fill_(junk)
