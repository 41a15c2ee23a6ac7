# SPDX-License-Identifier: Apache-2.0
"""`rescale="flash"` on a CPU: the operator under torch's `scaled_dot_product_attention`, on rows
gathered by slot.

Tokens of a prompt that is no longer than what the indexer chooses see each other's rows: the slots
of each are the first ones of the next. Such tokens are taken together and share the rows of their
last, so that a prompt is products of matrices and not of vectors.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby, pairwise

import torch

from mla_kernels.cache.rows import as_words, rows_as_float
from mla_kernels.decode.torch_scratch import scratch
from mla_kernels.decode.torch_sdpa import attend_in_call, calls
from mla_kernels.sparse.slots import apply_sink, used_slots
from mla_kernels.torch_modes import without_modes

# Query rows that share keys in a call; their mask is a row for each.
MOST_QUERY_ROWS = 512


@dataclass(frozen=True)
class Run:
    """Tokens [first, first + tokens), whose slots are the first ones of the last, which has
    `length`."""

    first: int
    tokens: int
    length: int


@without_modes
def sparse_attention_by_sdpa(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    slots: torch.Tensor,
    *,
    scale: float,
    kv_lora_rank: int,
    kv_scale: float | torch.Tensor | None,
    lengths: torch.Tensor | None,
    sink: torch.Tensor | None,
    deterministic: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out [T, H, kv_lora_rank] in q.dtype, with a sink fp32, and lse [T, H] fp32), as
    `mla_sparse_attention` defines them. deterministic: tokens are taken one by one."""
    T, H, Dk = q.shape
    dtype = q.dtype
    if sink is not None:  # its factor would be rounded with an output that has been already
        q = q.float()
    q = q if q.stride(-1) == 1 else q.contiguous()  # the operator does not look
    slots, counts = used_first(slots, kv_cache.shape[0] * kv_cache.shape[1], lengths)
    out = q.new_zeros(T, H, kv_lora_rank)
    lse = q.new_full((T, H), -torch.inf, dtype=torch.float32)
    words = as_words(kv_cache)

    def attend(some: list[Run]) -> None:
        """Runs of as many tokens, together."""
        R, N = some[0].tokens, some[0].length
        tokens = torch.tensor([run.first for run in some], device=q.device)[:, None]
        tokens = tokens + torch.arange(R, device=q.device)
        limit = counts[tokens]  # [runs, R]
        rows = _gather(words, slots[tokens[:, -1], :N]).view(kv_cache.dtype)
        keys = rows_as_float(rows, dtype, kv_lora_rank, Dk, kv_scale).to(q.dtype)
        alone = R > 1 and not bool(keys.sum(dtype=torch.float32).isfinite())
        if not alone:
            found, found_lse = attend_in_call(
                q[tokens].view(len(some), 1, R * H, Dk),
                keys,
                None if bool((limit == N).all()) else limit[:, None],
                scale,
            )
            alone = R > 1 and bool(found_lse.isnan().any())
        if alone:
            # A NaN among the keys, or a score of inf, is for those tokens alone that see it.
            for token, length in zip(
                tokens.view(-1).tolist(), limit.view(-1).tolist(), strict=True
            ):
                if length:
                    attend([Run(token, 1, length)])
            return
        # Of parts that threads shared it is fp32, which putting it in does not convert.
        out[tokens] = found.view(len(some), R, H, -1)[..., :kv_lora_rank].to(out.dtype)
        lse[tokens] = found_lse.view(len(some), R, H)

    every = runs_of(slots, counts, 1 if deterministic else max(MOST_QUERY_ROWS // H, 1))
    for some in ([run] for run in every) if deterministic else together(every):
        attend(some)
    apply_sink(out, lse, sink, deterministic)
    return out, lse


def used_first(
    slots: torch.Tensor, num_rows: int, lengths: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """slots [T, most of a token] with those of use in front, in their order, and -1 behind; how
    many these are, [T]."""
    used = used_slots(slots, num_rows, lengths)
    counts = used.sum(1)
    longest = int(counts.max()) if counts.numel() else 0
    front = torch.arange(longest, device=counts.device) < counts[:, None]
    width = front.shape[1]
    if not torch.equal(used[:, :width], front):
        slots = slots.gather(1, torch.argsort(~used, dim=1, stable=True))
    return slots[:, :width].masked_fill(~front, -1), counts


def runs_of(slots: torch.Tensor, counts: torch.Tensor, most: int) -> list[Run]:
    """All tokens that have a slot in runs of at most `most`. slots, counts: from `used_first`."""
    T = len(slots)
    if most == 1 or T == 1:
        ends = list(range(T + 1))
    else:
        begins = (slots[1:] == slots[:-1]) | (slots[:-1] < 0)  # each slot, or there is none
        ends = [0, *((~begins.all(1)).nonzero().squeeze(1) + 1).tolist(), T]
    counted = counts.tolist()
    runs = []
    for start, end in pairwise(ends):
        for first in range(start, end, most):
            last = min(first + most, end)
            if length := counted[last - 1]:
                runs.append(Run(first, last - first, length))
    return runs


def together(runs: list[Run]) -> Iterator[list[Run]]:
    """Runs that one call takes: of as many tokens and of like length, the longest first."""
    ordered = sorted(runs, key=lambda run: (run.tokens, -run.length))
    for _, same in groupby(ordered, key=lambda run: run.tokens):
        some = list(same)
        for tile in calls([run.length for run in some], 0):
            yield some[tile.start : tile.stop]


def _gather(words: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """The rows [runs, N, words] of slots [runs, N]; zero bytes where there is none."""
    block_size, width = words.shape[1:]
    index = slots.reshape(-1)
    rows = scratch("rows", (len(index), width), words.dtype)
    at = index.clamp(min=0)
    if words.stride(0) == block_size * words.stride(1):
        torch.index_select(words.flatten(0, 1), 0, at, out=rows)
    else:
        rows.copy_(words[at // block_size, at % block_size])
    rows.index_fill_(0, (index < 0).nonzero().squeeze(1), 0)  # 0 * NaN would reach the output
    return rows.view(*slots.shape, width)
