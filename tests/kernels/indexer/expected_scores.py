# SPDX-License-Identifier: Apache-2.0
"""What the indexer's definition says of a case, and how near scores must be."""

import torch
from mla_kernels.indexer.reference import indexer_scores_reference

INF = float("inf")
IMPLS = ["torch", "triton"]
LENGTHS = [130, 0, 1, 64]
FORMATS = [(True, True), (False, True), (True, False), (False, False)]
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


def expected(case):
    """[T, width] fp64, by the definition: visible keys of each row, one row at a time."""
    T, B = len(case.q), len(case.seq_lens)
    lengths = []
    for t in range(T):
        request = t // (T // B) if case.request_ids is None else int(case.request_ids[t])
        if request < 0:
            lengths.append(0)
        elif case.positions is None:
            lengths.append(max(int(case.seq_lens[request]) - T // B + 1 + t % (T // B), 0))
        else:
            lengths.append(min(int(case.positions[t]) + 1, int(case.seq_lens[request])))
    lengths = torch.tensor(lengths, dtype=torch.int32)
    args = (case.q, case.k_cache, case.weights, case.block_table)
    return indexer_scores_reference(*args, lengths, request_ids=case.request_ids), lengths


def assert_scores(got, want):
    assert got.dtype == torch.float32
    assert torch.equal(torch.isneginf(got), torch.isneginf(want)), "masked entries"
    seen = ~torch.isneginf(want)
    got, want = got.double()[seen], want[seen]
    if want.numel() == 0:
        return
    assert torch.linalg.norm(got - want) <= 1e-5 * torch.linalg.norm(want)
    assert (got - want).abs().max() <= 1e-5 * want.abs().max()
