# SPDX-License-Identifier: Apache-2.0
"""MLA_BACKEND_CHECK=1: are the lengths, block tables and slots that a step got consistent?

Checked once a step, before any layer runs and outside CUDA graphs, on copies of what is on the
device. A wrong entry is otherwise an illegal access at best, another request's cache at worst.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from mla_backend import compat
from mla_backend.attention.shard import Shard


class StepCheck:
    """The check of one builder: `layer` has the cache, a `shard` of it, `drafts` are made."""

    def __init__(
        self, layer: Any, block_size: int, shard: Shard | None = None, drafts: bool = False
    ) -> None:
        self._layer = layer
        self._block_size = block_size
        self._shard = shard
        self._drafts = drafts

    def __call__(self, common: Any) -> None:
        """ValueError for a fault in vLLM's CommonAttentionMetadata `common`."""
        cache = self._layer.kv_cache
        if cache.numel() == 0:  # profiling, before there is a cache
            return
        check_step(
            common.block_table_tensor.cpu(),
            common.seq_lens.cpu(),
            common.query_start_loc.cpu(),
            common.slot_mapping.cpu(),
            num_blocks=cache.shape[0],
            block_size=self._block_size,
            shard=self._shard,
            drafts=self._drafts,
            request_ids=compat.request_ids,
        )


def check_step(
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    num_blocks: int,
    block_size: int,
    shard: Shard | None = None,
    drafts: bool = False,
    request_ids: Callable[[], Sequence[str]] = tuple,
) -> None:
    """ValueError naming the request (its place in the step and, if known, its id) and the value at
    fault.

    block_table      [>= B, max_blocks]; entries past a request's length may hold anything
    seq_lens         [>= B], the new tokens included
    query_start_loc  [B + 1], where each request's new tokens begin; none is a padded request
    slot_mapping     [>= tokens]; block * block_size + offset, -1 = not written here. Steps without
                     a single write are vLLM's dummies and are not compared with their tables.
    shard            of several ranks: the others' tokens have a slot of -1
    drafts           a draft model runs over tokens that were rejected too, and vLLM writes none of
                     those: a slot of -1 among others is no fault
    request_ids      asked only when there is a fault: ids in the order of the step. If they are
                     more than its rows, it is part of a batch (vLLM's DBO), and none is named
    """
    B = query_start_loc.shape[0] - 1
    starts = query_start_loc.long()
    lens, new = seq_lens[:B].long(), starts.diff()
    block_table = block_table[:B].long()
    shard = shard or Shard()
    capacity = block_table.shape[1] * block_size * shard.size

    def named(request: int) -> str:
        ids = request_ids()
        return f"{request} (id {ids[request]})" if request < len(ids) <= B else str(request)

    def fail(request: int, fault: str) -> None:
        raise ValueError(
            f"MLA_BACKEND_CHECK: request {named(request)} of the {B} in this step (seq_len "
            f"{int(lens[request])}, {int(new[request])} new tokens): {fault}"
        )

    for wrong, fault in (
        (new < 0, "its new tokens end before they begin"),
        ((lens < 0) | (lens > capacity), f"expected a seq_len in 0..{capacity}"),
        ((new > lens) & (lens > 0), "more new tokens than its length"),
    ):
        if wrong.any():
            fail(int(wrong.nonzero()[0]), fault)

    column = torch.arange(block_table.shape[1])
    # Under DCP a block holds so many tokens of each rank.
    used = column[None] * (block_size * shard.size) < lens[:, None]
    bad = used & ((block_table < 0) | (block_table >= num_blocks))
    if bad.any():
        request, j = bad.nonzero()[0].tolist()
        entry = int(block_table[request, j])
        fail(request, f"block table column {j} holds {entry}, expected 0..{num_blocks - 1}")
    tokens = int(starts[-1])
    slots = slot_mapping[:tokens].long()
    request_of = torch.repeat_interleave(torch.arange(B), new)
    _check_slots(slots, request_of, num_blocks * block_size, named, fail)
    if (slots >= 0).any():
        positions = lens[request_of] - new[request_of] + torch.arange(tokens) - starts[request_of]
        expected = shard.slots(positions, block_table, request_of, block_size)
        wrong = slots != expected
        if drafts:
            wrong &= slots >= 0
        if wrong.any():
            token = int(wrong.nonzero()[0])
            said = f"its block table says {int(expected[token])}"
            if expected[token] < 0:
                said = f"expected -1, as it is not of rank {shard.rank} of {shard.size}"
            fail(
                int(request_of[token]),
                f"position {int(positions[token])} is written to slot {int(slots[token])}, {said}",
            )


def _check_slots(
    slots: torch.Tensor,
    request_of: torch.Tensor,
    size: int,
    named: Callable[[int], str],
    fail: Callable[[int, str], None],
) -> None:
    """Slots within the cache, and no two tokens in one."""
    outside = (slots < -1) | (slots >= size)
    if outside.any():
        token = int(outside.nonzero()[0])
        fail(int(request_of[token]), f"slot {int(slots[token])}, expected -1..{size - 1}")
    ordered, order = slots.sort(stable=True)
    twice = (ordered[1:] == ordered[:-1]) & (ordered[1:] >= 0)
    if twice.any():
        place = int(twice.nonzero()[0])
        first, second = (int(request_of[order[place + i]]) for i in (0, 1))
        fail(second, f"slot {int(ordered[place])} is written by request {named(first)} too")
