# SPDX-License-Identifier: Apache-2.0
"""Decode context parallelism: tokens dealt to ranks, results merged by vLLM's own code, and the
choices of a sparse model's ranks by ours."""

import types

import pytest
import torch
from mla_kernels import exact_topk, mla_decode
from mla_kernels.decode.reference import mla_decode_reference
from mla_kernels.layouts import MlaDims
from mla_kernels.testing import metrics
from mla_kernels.testing.cases import decode_case, random_tokens
from mla_kernels.testing.graphs import captured

# With 4 ranks, some hold nothing of the first requests.
LENGTHS = [1, 2, 3, 64, 65, 129, 500, 1000]


@pytest.mark.parametrize("ranks, interleave", [(2, 1), (4, 1), (2, 64)])
@pytest.mark.parametrize("impl", ["hopper", "triton"])
def test_ranks_merge_to_the_whole(impl, ranks, interleave):
    from vllm.v1.attention.backends.utils import get_dcp_local_seq_lens

    try:
        from vllm.v1.attention.ops.dcp import CPTritonContext, correct_attn_out
    except ImportError:  # vLLM before 0.29
        from vllm.v1.attention.ops.common import CPTritonContext, correct_attn_out

    tokens = random_tokens(LENGTHS, MlaDims(), device="cuda")
    case = decode_case(LENGTHS, num_heads=128, q_std=0.5, tokens=tokens, device="cuda")
    want, want_lse = mla_decode_reference(*case.args, **case.options, causal=True)
    results = []
    for rank in range(ranks):
        held = [t[torch.arange(len(t)) // interleave % ranks == rank] for t in tokens]
        part = decode_case(
            [len(t) for t in held], num_heads=128, tokens=held, q=case.q, device="cuda"
        )
        lens = get_dcp_local_seq_lens(case.seq_lens, ranks, rank, interleave)
        assert torch.equal(lens, part.seq_lens)
        results.append(mla_decode(*part.args, **case.options, impl=impl))
    lses = torch.stack([lse[:, 0] for _, lse in results])
    total = torch.zeros_like(want[:, 0], dtype=torch.float32)
    for rank, (out, _) in enumerate(results):
        corrected, lse = correct_attn_out(
            out[:, 0].clone(), lses, rank, CPTritonContext(), is_lse_base_on_e=True
        )
        total += corrected.float()
        assert (lse - want_lse[:, 0]).abs().max() < 2**-8
    # Each rank's part is rounded to bf16 twice: by the kernel and by the correction.
    measured = metrics.measure(total, want[:, 0])
    assert not metrics.SHORT_BAR.failures(measured), measured


TOKENS, TOPK = 10_000, 2048


def choices_of_a_rank(rows, seed):
    """candidates [rows, 2, k] int32 of `Shard.merge`, few scores, fewer than k in most rows."""
    g = torch.Generator().manual_seed(seed)
    local = torch.rand(rows, TOKENS, generator=g).topk(TOPK).indices.sort().values.int()
    scores = torch.randint(0, 50, (rows, TOPK), generator=g).float()
    none = torch.arange(TOPK) >= torch.randint(0, 2 * TOPK, (rows, 1), generator=g)
    local, scores = local.masked_fill(none, -1), scores.masked_fill(none, -torch.inf)
    return torch.stack([local, scores.view(torch.int32)], 1)


def best_of_all(candidates, rank):
    """The k best of the ranks' tokens that lie on `rank`, by the definition."""
    ranks, rows = len(candidates), len(candidates[0])
    scores = torch.full((rows, TOKENS * ranks + 1), -torch.inf)
    for r, (local, bits) in enumerate(x.unbind(1) for x in candidates):
        position = torch.where(local < 0, TOKENS * ranks, local * ranks + r).long()
        scores.scatter_(1, position, bits.contiguous().view(torch.float32))
    best = exact_topk(scores[:, :-1].contiguous(), TOPK, impl="torch")
    own = [row[(row >= 0) & (row % ranks == rank)] // ranks for row in best]
    return torch.stack([torch.nn.functional.pad(x, (0, TOPK - len(x)), value=-1) for x in own])


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("rows", [1, 32, 200])
def test_choices_are_merged_in_a_graph(rows, ranks):
    """Captured once, replayed with other candidates; torch sorts each size by another kernel."""
    from mla_backend.attention.sparse.dcp import Shard

    def load(seed):
        return [choices_of_a_rank(rows, 100 * seed + rank) for rank in range(ranks)]

    rank, config = ranks - 1, types.SimpleNamespace(cp_kv_cache_interleave_size=1)
    theirs = torch.zeros((ranks - 1) * rows, 2 * TOPK, dtype=torch.int32, device="cuda")
    group = types.SimpleNamespace(all_gather=lambda x, dim: torch.cat([theirs, x], dim))
    shard, own = Shard(rank, ranks, group, config), torch.zeros(rows, 2, TOPK).int().cuda()
    chosen = torch.empty(rows, TOPK, dtype=torch.int32, device="cuda")

    def put(candidates):
        others = torch.stack(candidates[:-1])
        for r in range(ranks - 1):  # as they would send them
            peer = Shard(r, ranks, None, config)
            others[r, :, 0] = peer.to_global(others[r, :, 0])
        theirs.copy_(others.view(theirs.shape))
        own.copy_(candidates[-1])
        chosen.fill_(7)

    put(load(0))
    graph, _ = captured(lambda: shard.merge(own, chosen, "auto"))  # the first call computes
    assert torch.equal(chosen.cpu(), best_of_all(load(0), rank))
    for seed in (1, 2):
        put(load(seed))
        graph.replay()
        assert torch.equal(chosen.cpu(), best_of_all(load(seed), rank))
