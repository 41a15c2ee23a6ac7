# SPDX-License-Identifier: Apache-2.0
"""Bit-level guards of the rescale: the integer add, exact powers of two, the exp2 grid."""

import math

import pytest
import torch
from mla_kernels import mla_decode
from mla_kernels.decode.rescale import add_to_bits, grid_scores, pow2_int
from mla_kernels.layouts import MlaDims
from mla_kernels.numerics import GRID_OFFSET
from mla_kernels.testing.cases import decode_case, random_tokens


def bit_patterns():
    """A million random fp32 patterns and every neighbour of an exponent boundary, both signs."""
    g = torch.Generator().manual_seed(0)
    random = torch.randint(-(2**31), 2**31 - 1, (2**20,), generator=g, dtype=torch.int64)
    edges = (torch.arange(256)[:, None] * 2**23 + torch.arange(-3, 4)).flatten()
    edges = edges[(edges >= 0) & (edges < 2**31)]
    bits = torch.cat([random, edges, edges - 2**31]).to(torch.int32)
    values = bits.view(torch.float32)
    return values[torch.isfinite(values)]


@pytest.mark.parametrize("down", range(31))
def test_integer_add_is_exact_scaling_or_zero(down):
    """Against the exact product: equal where exponent >= down + 2, else 0, never anything else."""
    x = bit_patterns()
    moved = add_to_bits(x, torch.tensor(-(down << 23), dtype=torch.int32), torch.tensor(down))
    exponent = (x.view(torch.int32) >> 23) & 0xFF
    exact = torch.where(exponent >= down + 2, x.double() * 2.0**-down, 0.0)
    assert torch.equal(moved.double(), exact)


def test_the_bare_add_corrupts_what_the_guard_protects():
    zero = torch.zeros(1)
    bare = (zero.view(torch.int32) - (5 << 23)).view(torch.float32)
    assert abs(float(bare)) > 1e37
    assert (
        float(add_to_bits(zero, torch.tensor(-(5 << 23), dtype=torch.int32), torch.tensor(5))) == 0
    )


def test_pow2_int():
    e = torch.arange(0, -200, -1).float()
    assert torch.equal(pow2_int(e), torch.where(e >= -126, torch.exp2(e.double()), 0.0).float())


def test_every_grid_point_rounds_alike():
    """exp2 of all 4096 fractions, off by 2^-21 either way, rounds to the same bf16."""
    p = torch.exp2(-torch.arange(4096, dtype=torch.float64) / 4096)
    want = p.float().to(torch.bfloat16)
    for wrong in (1 - 2**-21, 1 + 2**-21):
        assert torch.equal((p * wrong).float().to(torch.bfloat16)[1:], want[1:])
    assert torch.equal(torch.exp2(-torch.arange(4096).float() / 4096).to(torch.bfloat16), want)


def test_grid_scores_lie_on_the_grid():
    qk = torch.randn(10_000, generator=torch.Generator().manual_seed(0)) * 100
    t = grid_scores(qk, 0.06).double() - GRID_OFFSET
    assert torch.equal(t * 4096, (t * 4096).round())
    assert (t - qk.double() * 0.06).abs().max() <= 2**-13


@pytest.mark.parametrize("rescale", ["pow2", "amla", "flash"])
@pytest.mark.parametrize(
    "change",
    [
        lambda v: v.index_fill_(1, torch.tensor([7]), 0.0),
        lambda v: v[:256].zero_(),
        lambda v: v[:256].mul_(1e-38),
        lambda v: v[:, :512].mul_(2.0**-100),
        lambda v: v[:, :512].mul_(2.0**100),
        lambda v: v[::2, :512].zero_(),
    ],
    ids=["zero column", "zeros first", "subnormals first", "tiny", "huge", "every other zero"],
)
def test_special_values(rescale, change):
    """The rope columns alone make the scores, rising so that every block rescales."""
    tokens = random_tokens([512], MlaDims())
    tokens[0][:, 512:] = torch.linspace(0, 40, 512)[:, None]
    change(tokens[0])
    q = torch.zeros(1, 1, 4, 576)
    q[..., 512:] = 1.0
    case = decode_case([512], tokens=tokens, q=q, scale=1 / 24)
    out, _ = mla_decode(*case.args, **case.options, rescale=rescale)
    want, _ = mla_decode(*case.args, **case.options, impl="reference")
    assert torch.isfinite(out).all()
    error = (out.double() - want.double()).abs().max() / want.double().abs().max()
    assert error < 1.2e-2


@pytest.mark.parametrize("rescale", ["pow2", "amla", "flash"])
@pytest.mark.parametrize("level", [1e3, -1e3, 1e4, -1e4])
def test_scores_far_from_zero(rescale, level):
    """A constant on all scores changes nothing, up to the resolution of the scores themselves."""
    tokens = random_tokens([300], MlaDims(), std=0.1)
    tokens[0][:, 512] = level
    q = torch.zeros(1, 1, 4, 576)
    q[..., 512] = 1.0
    case = decode_case([300], tokens=tokens, q=q, scale=1.0)
    out, lse = mla_decode(*case.args, **case.options, rescale=rescale)
    want = tokens[0].to(torch.bfloat16)[:, :512].double().mean(0)
    assert (out[0, 0].double() - want).abs().max() < 1e-3
    rounded = float(torch.tensor(level).to(torch.bfloat16))
    assert float(lse[0, 0, 0]) == pytest.approx(rounded + math.log(300), rel=1e-5)
