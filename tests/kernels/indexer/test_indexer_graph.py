# SPDX-License-Identifier: Apache-2.0
"""The indexer and the cache writes in CUDA graphs, replayed with other inputs, beside launches of
their own, which other tests compare with the definition."""

import pytest
import torch
from mla_kernels import indexer_topk, indexer_topk_workspace, write_indexer_cache, write_kv_cache
from mla_kernels.indexer.rows import token_rows
from mla_kernels.testing.graphs import captured
from mla_kernels.testing.indexer_case import make_indexer_case

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


# Few rows, which several programs share and count in memory that outlives a launch, and many.
@pytest.mark.parametrize("lengths", [[40000], [9000, 3000, 64, 1, 20000], [3000] * 150])
def test_topk_of_other_lengths_and_queries(lengths):
    case = make_indexer_case(lengths, device="cuda")
    rows, blocks = len(lengths), case.block_table.shape[1]
    workspace = indexer_topk_workspace(rows, blocks, torch.device("cuda"))
    out = torch.empty(rows, 2048, dtype=torch.int32, device="cuda")
    graph, _ = captured(lambda: indexer_topk(*case.args, 2048, out=out, workspace=workspace))
    g = torch.Generator().manual_seed(3)
    longest = case.seq_lens.clone()
    for shrink in (1.0, 0.3, 0.9, 0.0):
        case.seq_lens.copy_((longest * shrink).int())
        case.q.copy_(torch.randn(case.q.shape, generator=g).to(case.q.dtype))
        out.fill_(7)
        graph.replay()
        assert torch.equal(out, indexer_topk(*case.args, 2048))


@pytest.mark.parametrize("cache", ["bf16", "fp8", "fp8_ds_mla"])
def test_writes_to_other_slots(cache):
    dtype, width, kv_scale = {
        "bf16": (torch.bfloat16, 576, None),
        "fp8": (torch.float8_e4m3fn, 576, 0.02),
        "fp8_ds_mla": (torch.uint8, 656, None),
    }[cache]
    T = 33
    latent = torch.randn(T, 512, dtype=torch.bfloat16, device="cuda")
    rope = torch.randn(T, 64, dtype=torch.bfloat16, device="cuda")
    keys = torch.randn(T, 128, dtype=torch.bfloat16, device="cuda")
    rows = torch.zeros(5, 64, width, dtype=torch.uint8, device="cuda").to(dtype)
    index = torch.zeros(5, 64, 132, dtype=torch.uint8, device="cuda")
    slots = torch.arange(T, device="cuda")

    def write():
        write_kv_cache(latent, rope, rows, slots, kv_scale=kv_scale)
        write_indexer_cache(keys, index, slots)

    def written(step):
        rows.view(torch.uint8).fill_(0xA5)
        index.fill_(0xA5)
        step()
        return rows.view(torch.uint8).clone(), index.clone()

    graph, _ = captured(write)
    for seed in range(3):
        g = torch.Generator().manual_seed(seed)
        slots.copy_(torch.randperm(5 * 64, generator=g)[:T])
        slots[seed] = -1
        latent.normal_()
        keys.normal_()
        replayed, launched = written(graph.replay), written(write)
        assert all(torch.equal(a, b) for a, b in zip(replayed, launched, strict=True))
        assert (replayed[0].flatten(0, 1) != 0xA5).any(1).sum() == T - 1


def test_rows_of_lengths_that_advance_in_the_graph():
    """As in a graph of several drafts: of three requests, the last of which is padding later."""
    starts = torch.arange(4, dtype=torch.int32, device="cuda")
    seq_lens = torch.tensor([5, 200, 64], dtype=torch.int32, device="cuda")
    request_ids, lengths = (torch.full_like(seq_lens, -7) for _ in range(2))
    seen = torch.zeros(2, 3, dtype=torch.int32, device="cuda")

    def two_drafts():
        for draft in range(2):
            token_rows(starts, seq_lens, request_ids=request_ids, lengths=lengths)
            seen[draft].copy_(lengths)
            seq_lens.add_(1)

    graph, _ = captured(two_drafts)
    seq_lens.copy_(torch.tensor([9, 63, 0]))
    starts[3] = 2
    graph.replay()
    assert seen.tolist() == [[9, 63, 0], [10, 64, 0]]
    assert request_ids.tolist() == [0, 1, -1]
