# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of decode/hopper/scales.py in torch: what fp16 holds of codes, scales and weights
under a power of two M of each tile of 64 tokens."""

import math
from pathlib import Path

import pytest
import torch
from mla_kernels.testing import metrics

pytest.importorskip("triton")
from mla_kernels.decode.hopper import scales as constants
from mla_kernels.numerics import TAU

FIRST, UP, DOWN, LEAST, MOST = (
    int(getattr(constants, name).value) for name in ("FIRST", "UP", "DOWN", "LEAST", "MOST")
)
HEADROOM = constants.TILE_HEADROOM.value
WIDTH = 128  # one group of columns


def exponents_of(scales):
    """[tokens] of log2 M, in float64."""
    tiles = len(scales.split(64))
    by_tile = torch.empty(tiles, dtype=torch.float64)
    for warpgroup in range(2):
        exponent = FIRST
        for n in range(warpgroup, tiles, 2):
            largest = scales[n * 64 : (n + 1) * 64].max().item()
            top = math.frexp(largest)[1] - 1 if largest else -127
            bounded = min(max(top, LEAST), MOST)
            low = bounded < exponent - DOWN and top > constants.ZERO.value
            exponent = bounded if bounded > exponent + UP or low else exponent
            by_tile[n] = exponent
    return by_tile.repeat_interleave(64)[: len(scales)]


def attend(q, codes, scales, headroom=HEADROOM):
    """softmax(q K^T) K of one group, [rows, WIDTH], sums in float64; q already times scale."""
    exponent = exponents_of(scales)
    ratio = (scales.double() / 2**exponent).half()
    rows = (codes.half() * ratio[:, None]).double()
    assert rows.isfinite().all()
    shifted = q @ rows.T * 2**exponent / math.log(2) + exponent  # log2 of P with M in it
    k = torch.ceil(shifted.max(1, keepdim=True).values) - headroom
    p = torch.exp2(shifted - k).half()
    assert p.isfinite().all()
    p = p.double()
    return p @ rows / (p / 2**exponent).sum(1, keepdim=True)


def exact(q, codes, scales):
    rows = codes.double() * scales.double()[:, None]
    return torch.softmax(q @ rows.T, 1) @ rows


def random_rows(tokens, seed=0):
    g = torch.Generator().manual_seed(seed)
    values = torch.randn(tokens, WIDTH, generator=g)
    scales = values.abs().amax(1) / 448
    codes = (values / scales[:, None]).to(torch.float8_e4m3fn).float()
    return torch.randn(4, WIDTH, generator=g).double(), codes, scales


def error(q, codes, scales, **options):
    return metrics.measure(attend(q, codes, scales, **options), exact(q, codes, scales)).fro


@pytest.mark.parametrize("size", [-22, -10, 0, 12])
def test_scales_of_any_mantissa(size):
    """The ratio and its product are rounded to fp16 each; the output's rounding is 1.7e-3."""
    q, codes, scales = random_rows(1000)
    assert error(q * 2.0**-size / 8, codes, scales * 2.0**size) < 7e-4


def test_m_follows_scales_within_its_bounds():
    near = torch.full((64 * 8,), 2.0**FIRST)
    sizes = torch.tensor([0, 0, UP, UP, UP + 1, -DOWN, -DOWN - 1, -200.0])
    exponents = exponents_of(near * 2 ** sizes.repeat_interleave(64))[::64]
    assert exponents.tolist() == [FIRST, FIRST, FIRST, FIRST, FIRST + UP + 1, FIRST,
                                  FIRST - DOWN - 1, FIRST]  # fmt: skip
    assert exponents_of(torch.full((64,), 2.0**-60)).tolist() == [LEAST] * 64
    assert exponents_of(torch.full((64,), 2.0**100)).tolist() == [MOST] * 64


@pytest.mark.parametrize("small", [2.0**-6, 2.0**-8, 2.0**-12, 2.0**-30])
def test_small_scales_of_a_tile(small):
    """Those of 2^-8 of the largest or more keep the digits of bf16 in values of 2^-16 of 448 times
    the largest; no value errs by more than that."""
    _q, codes, scales = random_rows(64)
    scales = 2.0 ** (FIRST - DOWN) * (1 + torch.rand(64)) / 2  # M is as far above as it may be
    scales[0] = 2.0 ** (FIRST - DOWN)
    scales[1:] *= small
    assert exponents_of(scales)[0] == FIRST
    rows = (codes.half() * (scales.double() / 2.0**FIRST).half()[:, None]).double() * 2.0**FIRST
    want = codes.double() * scales.double()[:, None]
    least = 2.0**-16 * 448 * scales[0].double()
    assert (rows - want).abs().max() <= least
    if small > 2.0**-8:
        large = want.abs() >= least
        assert (rows - want).abs()[large].le(want.abs()[large] * 2**-8).all()


def test_weights_keep_their_digits_beside_a_large_scale():
    """One token weighs as much as 2047 others and has 2^9 of their scales."""
    codes = torch.full((2048, WIDTH), 256.0)
    codes[0] = 0.0
    codes[0, :2] = torch.tensor([64.0, 448.0])
    scales = torch.full((2048,), 2.0**-8)
    scales[0] = 2.0
    q = torch.zeros(1, WIDTH, dtype=torch.float64)
    q[0, 0] = 0.0875 * math.log(2)
    columns = slice(2, None)  # of the many
    want = exact(q, codes, scales)[:, columns]
    with_headroom, without = (
        metrics.measure(attend(q, codes, scales, headroom=h)[:, columns], want).fro
        for h in (HEADROOM, 0.0)
    )
    assert with_headroom < 5e-4 < metrics.SHORT_BAR.fro < without


def test_weights_never_pass_fp16():
    assert 2 ** (TAU + HEADROOM) < torch.finfo(torch.half).max
    assert 448 * 2.0 ** (UP + 1) < torch.finfo(torch.half).max


def test_the_page_states_what_is_lost():
    page = (Path(__file__).parents[3] / "docs" / "numerics.md").read_text()
    assert f"is below 2^-{25 + HEADROOM:.0f} (sparse: 2^-25)" in page
