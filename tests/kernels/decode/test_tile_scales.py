# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of decode/hopper/scales.py in torch: what fp16 holds of codes, scales and weights
under a power of two M of each tile of 64 tokens. M and the ratios are the kernel's own."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from mla_kernels.numerics import TAU
from mla_kernels.testing import metrics

pytest.importorskip("triton")
from mla_kernels.decode.hopper import scales as constants
from mla_kernels.decode.hopper.fp8.tile_scales import clear_scales_past, store_ratios
from mla_kernels.testing.gluon_numpy import Shared, array, language, with_hardware

FIRST, UP, DOWN, LEAST, MOST = (
    int(getattr(constants, name).value) for name in ("FIRST", "UP", "DOWN", "LEAST", "MOST")
)
HEADROOM = constants.TILE_HEADROOM.value
WIDTH = 128  # one group of columns


def on_numpy(function):
    """The kernel's own Python, on numpy arrays."""
    return with_hardware(function, language(1, 0))


def factors_of(scales):
    """(log2 M, scale / M as fp16 holds it) of each token of a segment, whose tiles two warpgroups
    take in turn. Behind the last token are infinities."""
    tokens, tiles = len(scales), -(-len(scales) // 64)
    padded = np.full((tiles, 64, 4), np.inf, np.float32)
    padded.reshape(-1, 4)[:tokens] = scales.float().numpy()[:, None]
    exponents = np.empty((tiles, 64))
    ratios = np.empty((tiles, 64))
    for warpgroup in range(2):
        exponent = array(np.int32(FIRST))
        for n in range(warpgroup, tiles, 2):
            tile, found = Shared(padded[n]), Shared(np.empty(256, np.float16))
            on_numpy(clear_scales_past)(tile, array(np.int32(tokens - n * 64)))
            exponent = on_numpy(constants.next_exponent)(tile, exponent)
            on_numpy(store_ratios)(tile, exponent, found)
            exponents[n], ratios[n] = exponent, found.data[:64]
    return (torch.from_numpy(x.reshape(-1)[:tokens]) for x in (exponents, ratios))


def attend(q, codes, scales, headroom=HEADROOM):
    """softmax(q K^T) K of one group, [rows, WIDTH], sums in float64; q already times scale."""
    exponent, ratio = factors_of(scales)
    rows = (codes.half() * ratio.half()[:, None]).double()
    assert rows.isfinite().all()
    shifted = q @ rows.T * 2**exponent / math.log(2) + exponent  # log2 of P with M in it
    k = torch.ceil(shifted.max(1, keepdim=True).values) - headroom
    p = torch.exp2(shifted - k).half()
    assert p.isfinite().all()
    p = p.double()
    return p @ rows / (p / 2**exponent).sum(1, keepdim=True)


def log2_m(scales):
    exponent, _ratio = factors_of(scales)
    return exponent


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
    exponents = log2_m(near * 2 ** sizes.repeat_interleave(64))[::64]
    assert exponents.tolist() == [FIRST, FIRST, FIRST, FIRST, FIRST + UP + 1, FIRST,
                                  FIRST - DOWN - 1, FIRST]  # fmt: skip
    assert log2_m(torch.full((64,), 2.0**-60)).tolist() == [LEAST] * 64
    assert log2_m(torch.full((64,), 2.0**100)).tolist() == [MOST] * 64


@pytest.mark.parametrize("small", [2.0**-6, 2.0**-8, 2.0**-12, 2.0**-30])
def test_small_scales_of_a_tile(small):
    """Those of more than 2^-8 of the largest keep the digits of bf16 in values of 2^-16 of 448
    times the largest; no value errs by more than that."""
    _q, codes, scales = random_rows(64)
    scales = scales / scales.max() * 2.0 ** (FIRST - DOWN)  # M is as far above as it may be
    scales[0] = 2.0 ** (FIRST - DOWN)
    scales[1:] *= small
    assert log2_m(scales)[0] == FIRST
    _exponent, ratio = factors_of(scales)
    rows = (codes.half() * ratio.half()[:, None]).double() * 2.0**FIRST
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
