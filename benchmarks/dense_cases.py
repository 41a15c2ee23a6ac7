# SPDX-License-Identifier: Apache-2.0
"""The dense decode benchmark's cases, their data on the GPU, and what they cost at least."""

import math
from dataclasses import dataclass, replace

import torch
from mla_kernels.cache.rows import rows_as_float
from mla_kernels.cache.torch_impl import encode_rows
from mla_kernels.decode.rescale import scale_to_log2
from mla_kernels.layouts import Fp8DsMlaLayout
from mla_kernels.numerics import LOG2E

LATENT, ROPE, PAGE = 512, 64, 64
WIDTH = LATENT + ROPE
SCALE = WIDTH**-0.5
ROW_BYTES = {"bf16": 2 * WIDTH, "fp8": WIDTH, "fp8_ds_mla": Fp8DsMlaLayout().row_bytes}
CACHE_DTYPES = {
    "bf16": torch.bfloat16,
    "fp8": torch.float8_e4m3fn,
    "fp8_ds_mla": torch.uint8,
}
FP8_SCALE = 2.0**-10


@dataclass(frozen=True)
class Shape:
    """One case: requests of `lengths` tokens."""

    name: str
    heads: int
    s_q: int
    lengths: tuple[int, ...]
    cache: str = "bf16"

    @property
    def flops(self) -> int:
        """Two matrix products over every cached token: 2 * (576 + 512) a token and query row."""
        return 2 * sum(self.lengths) * self.heads * self.s_q * (WIDTH + LATENT)

    @property
    def bytes(self) -> int:
        """The cache once, q and out once."""
        rows = len(self.lengths) * self.heads * self.s_q
        return sum(self.lengths) * ROW_BYTES[self.cache] + rows * (WIDTH + LATENT) * 2

    def floor_us(self, roofs: dict[str, float]) -> float:
        return least_us(self.flops, self.bytes, roofs)


def least_us(flops: int, bytes_: int, roofs: dict[str, float]) -> float:
    """What the machine's measured roofs allow."""
    return max(flops / roofs["bf16_gemm_tflops"] / 1e6, bytes_ / roofs["read_gbps"] / 1e3)


def even(batch: int, heads: int, s_q: int, tokens: int, cache: str = "bf16") -> Shape:
    name = f"b{batch}_h{heads}_q{s_q}_k{tokens}"
    return Shape(
        name if cache == "bf16" else f"{name}_{cache}", heads, s_q, (tokens,) * batch, cache
    )


def ragged(heads: int) -> Shape:
    """32 requests, 200 to 128K tokens, evenly spread on a log scale."""
    lengths = tuple(round(200 * math.exp(i / 31 * math.log(131072 / 200))) for i in range(32))
    return Shape(f"ragged32_h{heads}_200-128k", heads, 1, lengths)


SHAPES = [
    even(96, 128, 1, 1024),
    even(96, 128, 1, 4096),
    even(96, 128, 1, 16384),
    even(96, 128, 2, 4096),
    even(96, 128, 2, 16384),
    even(128, 128, 1, 4096),
    even(128, 64, 1, 4096),
    even(128, 32, 1, 4096),
    even(128, 16, 1, 4096),
    even(64, 8, 1, 4096),
    even(32, 16, 1, 8192),
    even(8, 128, 1, 8192),
    even(4, 16, 4, 16384),
    even(4, 16, 1, 32768),
    even(1, 128, 1, 4096),
    even(1, 128, 1, 32768),
    even(1, 16, 1, 131072),
    # Beyond the published tables: uneven batches, few heads, several new tokens, fp8 caches.
    ragged(128),
    ragged(16),
    even(128, 8, 1, 4096),
    even(128, 32, 1, 16384),
    even(128, 16, 1, 16384),
    even(32, 16, 1, 65536),
    even(64, 6, 1, 4096),
    even(64, 12, 1, 4096),
    even(64, 16, 2, 4096),
    even(64, 16, 3, 4096),
    even(64, 16, 4, 4096),
    even(128, 16, 1, 4096, "fp8"),
    even(128, 16, 1, 4096, "fp8_ds_mla"),
    even(128, 16, 1, 16384, "fp8"),
    even(128, 32, 1, 4096, "fp8"),
    even(128, 32, 1, 4096, "fp8_ds_mla"),
    even(128, 64, 1, 4096, "fp8"),
    even(128, 64, 1, 4096, "fp8_ds_mla"),
    even(96, 128, 1, 4096, "fp8"),
    even(96, 128, 1, 4096, "fp8_ds_mla"),
    even(96, 128, 2, 4096, "fp8"),
    even(96, 128, 1, 16384, "fp8"),
    even(1, 128, 1, 32768, "fp8"),
    even(1, 16, 1, 131072, "fp8"),
]


@dataclass
class Batch:
    """A shape's tensors. Rows past a request's end are NaN, but for those of `zero_tails`."""

    shape: Shape
    q: torch.Tensor
    kv_cache: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor

    @property
    def kv_scale(self) -> float | None:
        return FP8_SCALE if self.shape.cache == "fp8" else None


def make_batch(shape: Shape, device: str = "cuda", seed: int = 0) -> Batch:
    """q ~ N(0, 1/9), cache ~ N(0, 1/100), blocks in random order."""
    torch.manual_seed(seed)
    lens = torch.tensor(shape.lengths, dtype=torch.int32, device=device)
    blocks = -(-lens // PAGE)
    width, total = int(blocks.max()), int(blocks.sum())
    order = torch.randperm(total, dtype=torch.int32, device=device)
    column = torch.arange(width, device=device)
    used = column < blocks[:, None]
    table = torch.zeros(len(shape.lengths), width, dtype=torch.int32, device=device)
    table[used] = order
    cache = torch.randn(total, PAGE, WIDTH, dtype=torch.bfloat16, device=device).div_(10)
    if shape.cache != "bf16":
        rows = [
            encode_rows(part[:, :LATENT], part[:, LATENT:], CACHE_DTYPES[shape.cache], FP8_SCALE)
            for part in cache.flatten(0, 1).split(2**18)
        ]
        cache = torch.cat(rows).view(total, PAGE, -1)
    fill_tails(cache, table, shape, 0x7F if shape.cache == "fp8_ds_mla" else torch.nan)
    q = torch.randn(len(shape.lengths), shape.s_q, shape.heads, WIDTH, device=device).div_(3)
    return Batch(shape, q.bfloat16(), cache, table, lens)


def fill_tails(cache: torch.Tensor, table: torch.Tensor, shape: Shape, value: float) -> None:
    """`value` into the rows behind each request's end, in its last block."""
    for pages, length in zip(table, shape.lengths, strict=True):
        if length % PAGE:
            cache[int(pages[length // PAGE]), length % PAGE :] = value


def has_tails(shape: Shape) -> bool:
    return any(length % PAGE for length in shape.lengths)


def zero_tails(batch: Batch) -> Batch:
    """The batch over a cache of its own, with zeros behind each request's end."""
    cache = batch.kv_cache.clone()
    fill_tails(cache, batch.block_table, batch.shape, 0)
    return replace(batch, kv_cache=cache)


def golden(batch: Batch, requests: list[int]) -> torch.Tensor:
    """out [len(requests), s_q, H, 512] fp32 of some requests, straight from the definition."""
    s_q = batch.shape.s_q
    outs = []
    for b in requests:
        n = batch.shape.lengths[b]
        pages = batch.block_table[b, : -(-n // PAGE)].long()
        rows = batch.kv_cache[pages].flatten(0, 1)[:n]
        k = rows_as_float(rows, torch.bfloat16, LATENT, WIDTH, batch.kv_scale).float()
        scores = torch.einsum("shd,nd->shn", batch.q[b].float(), k) * (scale_to_log2(SCALE) / LOG2E)
        limit = n - s_q + 1 + torch.arange(s_q, device=k.device)
        seen = torch.arange(n, device=k.device) < limit[:, None]
        weights = scores.masked_fill(~seen[:, None], -torch.inf).softmax(-1)
        outs.append(torch.einsum("shn,nd->shd", weights, k[:, :LATENT]))
    return torch.stack(outs)
