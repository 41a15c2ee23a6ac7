# SPDX-License-Identifier: Apache-2.0
"""Tokens in equal shares (sparse/hopper/shares.py): the cuts, and the merge of what they leave."""

from types import SimpleNamespace

import pytest
import torch
from mla_kernels.arch import ARCHS
from mla_kernels.sparse.hopper import support
from mla_kernels.sparse.hopper.shares import share_split
from mla_kernels.sparse.triton.results import launch_merge

GPU = torch.device("cuda")
LN2 = 0.6931471805599453


def programs_of(token, split, K):
    """The programs that have a tile of the token, by going through all tiles one by one."""
    per_token, share = -(-K // 64), split.span // 64
    return sorted({tile // share for tile in range(token * per_token, (token + 1) * per_token)})


@pytest.mark.parametrize("row_tiles", [1, 2, 3])
@pytest.mark.parametrize("K", [65, 600, 2048])
def test_no_token_has_more_parts_than_there_is_room_for(row_tiles, K):
    seen = 0
    for T in range(1, 140):
        split = share_split(T, row_tiles, K, 132)
        if split is None:
            per_token = -(-K // 64)
            assert T * per_token > (per_token - 1) * (132 // row_tiles)
            continue
        seen += 1
        parts = [len(programs_of(t, split, K)) for t in range(T)]
        assert split.shares and split.splits == max(parts) >= 2
        last = programs_of(T - 1, split, K)[-1]
        assert last < 132 // row_tiles, "more programs than run at once"
        tokens = [program for t in range(T) for program in programs_of(t, split, K)]
        most = max(tokens.count(program) for program in set(tokens))
        assert most <= 2, "more tokens of a program than its barriers have phases for"
    assert seen >= 66 // row_tiles


@pytest.mark.parametrize(("T", "K"), [(200, 2048), (5, 64), (5, 0), (66, 2048)])
def test_no_shares_of_whole_tokens(T, K):
    assert share_split(T, 2, K, 132) is None


@pytest.mark.parametrize(("tokens", "shared"), [(33, False), (34, True), (44, True), (45, False)])
def test_tokens_that_fill_a_part_of_the_device(tokens, shared, monkeypatch):
    """33 with 128 heads are two ranges each, a program an SM already; 45 are not split."""
    sms = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: sms)
    (turn,) = support.choose_turns(tokens, 128, 2048, GPU)
    assert turn.split.shares is shared
    if shared:
        grid = support.choose_grid(tokens, 128, 2048, "bf16", turn.split, GPU)
        assert grid == (programs_of(tokens - 1, turn.split, 2048)[-1] + 1, 2)


@pytest.mark.parametrize(("T", "K", "sms"), [(3, 300, 4), (3, 2048, 7), (4, 130, 7)])
def test_merge_of_shares(device, T, K, sms):
    """Partials that no program wrote are NaN."""
    H, split = 3, share_split(T, 1, K, sms)
    g = torch.Generator().manual_seed(T)
    acc = torch.full((T, split.splits, H, 512), torch.nan)
    sums = torch.full((T, split.splits, H, 2), torch.nan)
    sink = torch.randn(H, generator=g)
    want, want_lse = torch.empty(T, H, 512), torch.empty(T, H)
    for t in range(T):
        n = len(programs_of(t, split, K))
        acc[t, :n] = torch.randn(n, H, 512, generator=g)
        l = torch.rand(n, H, generator=g) + 0.5
        k = torch.randint(-5, 5, (n, H), generator=g).float()
        sums[t, :n] = torch.stack([l, k], -1)
        weight = 2.0 ** (k - k.amax(0))
        total = (l * weight).sum(0)
        with_sink = total + torch.exp2(sink / LN2 - k.amax(0))
        want[t] = (acc[t, :n] * weight[..., None]).sum(0) / with_sink[:, None]
        want_lse[t] = (k.amax(0) + torch.log2(total)) * LN2
    out = torch.full((T, H, 512), torch.nan, device=device)
    lse = torch.full((T, H), torch.nan, device=device)
    parts = [x.to(device) for x in (acc, sums, sink)]
    launch_merge(*parts, out, lse, split, K, ARCHS[90])
    assert torch.allclose(out.cpu(), want, rtol=1e-5, atol=1e-6)
    assert torch.allclose(lse.cpu(), want_lse, rtol=1e-5, atol=1e-6)
