# SPDX-License-Identifier: Apache-2.0
"""The indexer benchmark's cases, their data on the GPU, and what is right."""

from dataclasses import dataclass

import torch
from gpu import DEVICE
from mla_kernels import indexer_lengths
from mla_kernels.indexer.reference import indexer_scores_reference
from mla_kernels.layouts import BLOCK_SIZE
from mla_kernels.testing.indexer_case import IndexerCase

HEADS, DIM = 64, 128
KEY_BYTES = {"fp8": DIM + 4, "bf16": 2 * DIM}


# Some rows, and the scores that they should have.
Golden = tuple[list[int], torch.Tensor]


@dataclass(frozen=True)
class Shape:
    """One case: `batch` requests of `keys` tokens, of each the last s_q are rows. cache: "fp8",
    with e4m3 queries, or "bf16", with bf16 ones. prefill: each row names its request, as in a
    step with prompts."""

    batch: int
    keys: int
    s_q: int = 1
    cache: str = "fp8"
    prefill: bool = False

    @property
    def name(self) -> str:
        name = f"b{self.batch}x{self.keys}"
        if self.prefill:
            name = f"prefill{self.s_q}x{self.keys}"
        elif self.s_q > 1:
            name += f"_q{self.s_q}"
        return name if self.cache == "fp8" else f"{name}_{self.cache}"

    @property
    def rows(self) -> int:
        return self.batch * self.s_q

    @property
    def bytes(self) -> int:
        """The keys, once a request."""
        return self.batch * self.keys * KEY_BYTES[self.cache]

    @property
    def flops(self) -> int:
        """The products of every row with the keys that it sees."""
        seen = self.s_q * self.keys - self.s_q * (self.s_q - 1) // 2
        return 2 * HEADS * DIM * self.batch * seen


SHAPES = [
    *(Shape(b, n) for b, n in ((1, 131072), (1, 2**20), (8, 32768), (8, 131072))),
    *(Shape(64, n) for n in (8192, 32768, 131072)),
    *(Shape(256, n) for n in (32768, 131072)),
    *(Shape(64, 32768, s_q) for s_q in (2, 4)),
    Shape(8, 131072, 2),
    *(Shape(b, n, cache="bf16") for b, n in ((8, 131072), (64, 32768))),
    Shape(1, 4096, 4096, prefill=True),  # without a prefix: half of the rows see fewer than K keys
    *(Shape(1, 32768, 2048, cache, True) for cache in KEY_BYTES),
]


@dataclass
class Batch:
    """A shape's tensors. lengths [rows]: the keys that each row sees, computed once a step."""

    shape: Shape
    case: IndexerCase
    lengths: torch.Tensor

    @property
    def args(self) -> tuple[torch.Tensor, ...]:
        return self.case.args

    @property
    def options(self) -> dict[str, torch.Tensor | None]:
        """As an engine calls: requests are named where their rows are not equally many."""
        return {"lengths": self.lengths, "request_ids": self.case.request_ids}


def make_batch(shape: Shape, seed: int = 0) -> Batch:
    """Keys and queries N(0, 1), in e4m3 or bf16; pages in random order."""
    torch.manual_seed(seed)
    pages = shape.keys // BLOCK_SIZE
    if shape.cache == "fp8":
        cache = torch.empty(shape.batch * pages, 64 * 132, dtype=torch.uint8, device=DEVICE)
        for part in cache.split(8192):
            keys = torch.randn(len(part), 64 * DIM, device=DEVICE).to(torch.float8_e4m3fn)
            part[:, : 64 * DIM] = keys.view(torch.uint8)
            scales = torch.rand(len(part), 64, device=DEVICE) + 0.5
            part[:, 64 * DIM :] = scales.view(torch.uint8)
        dtype = torch.float8_e4m3fn
    else:
        dtype = torch.bfloat16
        cache = torch.randn(shape.batch * pages, 64 * DIM, dtype=dtype, device=DEVICE)
    table = torch.randperm(shape.batch * pages, device=DEVICE).int().view(shape.batch, pages)
    ids = None
    if shape.prefill:
        requests = torch.arange(shape.batch, dtype=torch.int32, device=DEVICE)
        ids = requests.repeat_interleave(shape.s_q)
    seq_lens = torch.full((shape.batch,), shape.keys, dtype=torch.int32, device=DEVICE)
    case = IndexerCase(
        torch.randn(shape.rows, HEADS, DIM, device=DEVICE).to(dtype),
        cache.unflatten(1, (64, -1)),
        torch.randn(shape.rows, HEADS, device=DEVICE),
        table,
        seq_lens,
        request_ids=ids,
    )
    return Batch(shape, case, indexer_lengths(seq_lens, shape.rows))


def golden(batch: Batch) -> Golden:
    """The first and the last row, and their scores in fp64, -inf where they see no key."""
    case, rows = batch.case, [0, batch.shape.rows - 1]
    of = torch.tensor([row // batch.shape.s_q for row in rows], device=case.q.device)
    args = case.q[rows], case.k_cache, case.weights[rows], case.block_table[of]
    return rows, indexer_scores_reference(*args, batch.lengths[rows])


def score_error(scores: torch.Tensor, rows: list[int], want: torch.Tensor) -> float:
    """Relative Frobenius error of some rows, over the keys that they see."""
    seen = want > -torch.inf
    got = scores[rows].double()[:, : want.shape[1]][seen]
    return float(torch.linalg.norm(got - want[seen]) / torch.linalg.norm(want[seen]))


def poison(scores: torch.Tensor, lengths: torch.Tensor) -> None:
    """NaN in the place of every score that a row sees, so that one which is not written is wrong:
    what is in the buffer are those of a run before. What lies behind stays, as torch.topk needs."""
    seen = torch.arange(scores.shape[1], device=scores.device) < lengths[:, None]
    scores.masked_fill_(seen, torch.nan)


def sorted_topk(scores: torch.Tensor, lengths: torch.Tensor, k: int) -> torch.Tensor:
    """[T, k] int32 by a stable sort: ascending indices, then -1."""
    n = scores.shape[1]
    unseen = torch.arange(n, device=scores.device) >= lengths[:, None]
    scores = scores.masked_fill(unseen, -torch.inf)
    found = torch.sort(scores, dim=1, descending=True, stable=True)
    chosen = found.indices.masked_fill_(found.values == -torch.inf, n)[:, :k].sort(dim=1).values
    return chosen.masked_fill_(chosen == n, -1).int()


def chooses_as_well(
    found: torch.Tensor, want: torch.Tensor, scores: torch.Tensor, lengths: torch.Tensor
) -> bool:
    """Whether each row of `found` [T, k] names keys with the scores of those of `want`, which is
    `sorted_topk`'s, none twice: in any order, and any of equal scores. What fills a row that has
    fewer than k keys may also be keys that it does not see: torch.topk knows no -1."""
    found, seen = found.long(), lengths[:, None]
    if ((found < -1) | (found >= scores.shape[1])).any():
        return False

    def chosen(keys: torch.Tensor) -> torch.Tensor:
        picked = scores.gather(1, keys.clamp(min=0))
        return picked.masked_fill((keys < 0) | (keys >= seen), -torch.inf).sort(dim=1).values

    keys = found.masked_fill(found >= seen, -1).sort(dim=1).values
    twice = (keys[:, 1:] == keys[:, :-1]) & (keys[:, 1:] >= 0)
    return torch.equal(chosen(found), chosen(want.long())) and not bool(twice.any())
