# SPDX-License-Identifier: Apache-2.0
"""`merge_topk` in torch, and as it is defined."""

import torch

from mla_kernels.topk.reference import exact_topk_reference
from mla_kernels.topk.torch_impl import exact_topk_torch

# Stands for no token and sorts behind all of them.
_NONE = 2**31 - 1


def positions_of(local: torch.Tensor, rank: int, ranks: int, interleave: int) -> torch.Tensor:
    """Positions within requests of a rank's own tokens; of -1 anything."""
    return (local // interleave * ranks + rank) * interleave + local % interleave


def merge_topk_torch(candidates: torch.Tensor, rank: int, interleave: int) -> torch.Tensor:
    """See `merge_topk`. In the order of their positions ties to the lowest column are ties to the
    lowest position."""
    ranks, T, _, k = candidates.shape
    local, bits = candidates.unbind(2)
    of_rank = [positions_of(local[r], r, ranks, interleave) for r in range(ranks)]
    position = torch.stack(of_rank, 1).masked_fill_(local.transpose(0, 1) < 0, _NONE)
    position, order = position.view(T, ranks * k).sort(dim=1)
    scores = bits.transpose(0, 1).reshape(T, ranks * k).gather(1, order).view(torch.float32)
    best = exact_topk_torch(scores.masked_fill(position == _NONE, -torch.inf), k)
    position = position.gather(1, best.clamp(min=0).long())
    mine = (position // interleave % ranks == rank) & (best >= 0)
    own = position // (ranks * interleave) * interleave + position % interleave
    # Those of this rank move to the front, in order; the others go to a spare column.
    column = torch.where(mine, mine.cumsum(1) - 1, k)
    found = own.new_full((T, k + 1), -1)
    return found.scatter_(1, column, own)[:, :k]


def merge_topk_reference(candidates: torch.Tensor, rank: int, interleave: int) -> torch.Tensor:
    """The top-k of a row of all tokens' scores, -inf for those that are no candidates."""
    ranks, T, _, k = candidates.shape
    out = candidates.new_full((T, k), -1)
    most = int(candidates[:, :, 0].max()) if T else 0
    width = (most // interleave + 1) * ranks * interleave
    for t in range(T):
        scores = torch.full((1, width), -torch.inf, device=candidates.device)
        for r, (local, bits) in enumerate(candidates[:, t]):
            held = local >= 0
            position = positions_of(local[held], r, ranks, interleave).long()
            scores[0, position] = bits[held].view(torch.float32)
        best = exact_topk_reference(scores, k)[0]
        local = candidates[rank, t, 0]
        local = local[local >= 0]
        mine = local[torch.isin(positions_of(local, rank, ranks, interleave), best)]
        out[t, : len(mine)] = mine
    return out
