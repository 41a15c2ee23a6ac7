# SPDX-License-Identifier: Apache-2.0
"""Prefill over pages against attention written out per request in fp64."""

import pytest
import torch

from mla_backend.attention.prefill import plan_prefill, run_prefill

H, NOPE, ROPE, LATENT, BLOCK = 3, 16, 8, 32, 64


def make_case(lengths, v_dim, dtype=torch.float32, seed=0):
    """Requests of (context, new) tokens over shuffled pages; everything unused is NaN."""
    g = torch.Generator().manual_seed(seed)
    seq_lens = torch.tensor([c + m for c, m in lengths], dtype=torch.int32)
    starts = torch.tensor([0, *[m for _, m in lengths]]).cumsum(0).to(torch.int32)
    pages = [-(-n // BLOCK) for n in seq_lens.tolist()]
    order = torch.randperm(sum(pages) + 3, generator=g)
    cache = torch.full((len(order), BLOCK, LATENT + ROPE), float("nan"), dtype=dtype)
    table = torch.full((len(lengths), max(pages) + 2), 2**30, dtype=torch.int32)
    contexts, taken = [], 0
    for r, n in enumerate(seq_lens.tolist()):
        table[r, : pages[r]] = order[taken : taken + pages[r]]
        taken += pages[r]
        rows = torch.randn(n, LATENT + ROPE, generator=g).to(dtype)
        padded = torch.full((pages[r] * BLOCK, LATENT + ROPE), float("nan"), dtype=dtype)
        padded[:n] = rows
        cache[table[r, : pages[r]].long()] = padded.view(pages[r], BLOCK, -1)
        contexts.append(rows)
    q = torch.randn(int(starts[-1]), H, NOPE + ROPE, generator=g).to(dtype)
    weight = torch.randn(LATENT, H * (NOPE + v_dim), generator=g).to(dtype) * LATENT**-0.5
    return q, cache, table, starts, seq_lens, contexts, weight


def make_expand(weight, v_dim):
    def expand(rows):
        kv = (rows[:, :LATENT] @ weight).view(len(rows), H, NOPE + v_dim)
        rope = rows[:, None, LATENT:].expand(-1, H, -1)
        return torch.cat([kv[..., :NOPE], rope], -1), kv[..., NOPE:]

    return expand


def reference(q, starts, contexts, weight, v_dim, scale):
    out = []
    expand = make_expand(weight.double(), v_dim)
    for r, rows in enumerate(contexts):
        k, v = expand(rows.double())
        qr = q[starts[r] : starts[r + 1]].double()
        scores = torch.einsum("qhd,khd->hqk", qr, k) * scale
        m, n = scores.shape[1:]
        scores = scores.masked_fill(torch.ones(m, n, dtype=torch.bool).triu(n - m + 1), -torch.inf)
        out.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v))
    return torch.cat(out)


MIXED = [(0, 5), (70, 3), (0, 1), (64, 64), (129, 1), (1, 200)]


@pytest.mark.parametrize("lengths", [MIXED, [(0, 1)], [(63, 1), (64, 1), (65, 1)], [(500, 7)]])
@pytest.mark.parametrize("max_tile_tokens", [1, 64, 100, 8192])
@pytest.mark.parametrize("v_dim", [16, 24, 40])
def test_matches_reference(lengths, max_tile_tokens, v_dim):
    q, cache, table, starts, seq_lens, contexts, weight = make_case(lengths, v_dim)
    tiles = plan_prefill(table, starts, seq_lens, block_size=BLOCK, max_tile_tokens=max_tile_tokens)
    out = torch.full((q.shape[0], H, v_dim), float("nan"))
    run_prefill(q, cache, tiles, make_expand(weight, v_dim), scale=0.3, out=out)
    expected = reference(q, starts, contexts, weight, v_dim, 0.3)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_error_is_rounding(dtype):
    q, cache, table, starts, seq_lens, contexts, weight = make_case(MIXED, 16, dtype)
    tiles = plan_prefill(table, starts, seq_lens, block_size=BLOCK, max_tile_tokens=64)
    out = torch.full((q.shape[0], H, 16), float("nan"), dtype=dtype)
    run_prefill(q, cache, tiles, make_expand(weight, 16), scale=0.3, out=out)
    expected = reference(q, starts, contexts, weight, 16, 0.3)
    error = (out.double() - expected).norm() / expected.norm()
    assert error < 2 * torch.finfo(dtype).eps


def test_tiles_stay_within_the_limit():
    _, _, table, starts, seq_lens, *_ = make_case([(1000, 10), (3, 2), (700, 90)], 16)
    tiles = plan_prefill(table, starts, seq_lens, block_size=BLOCK, max_tile_tokens=128)
    assert all(len(tile.slots) <= 128 for tile in tiles)
    assert sum(len(tile.slots) for tile in tiles) == int(seq_lens.sum())
    # Full but for what the unsplit new tokens leave over: no tile for every span.
    assert len(tiles) <= -(-int(seq_lens.sum()) // 128) + len(seq_lens)


def test_requests_share_a_tile():
    _, _, table, starts, seq_lens, *_ = make_case([(0, 5)] * 20, 16)
    assert len(plan_prefill(table, starts, seq_lens, block_size=BLOCK)) == 1
