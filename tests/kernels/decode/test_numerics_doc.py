# SPDX-License-Identifier: Apache-2.0
"""docs/numerics.md gives the constants and tolerances that code and tests use."""

from pathlib import Path

import pytest
from mla_kernels import numerics
from mla_kernels.testing import metrics

PAGE = (Path(__file__).parents[3] / "docs" / "numerics.md").read_text()


def test_tolerances():
    section = PAGE.split("| inputs | whole output | worst row |")[1].split("\n\n")[0]
    rows = [line.strip("| ").split("|") for line in section.splitlines()[2:]]
    stated = {name.strip(): (float(fro), float(row)) for name, fro, row in rows}
    bars = {
        **metrics.PAPER_BARS,
        "2 to 256 keys": metrics.SHORT_BAR,
        "128K keys, N1": metrics.LONG_BAR,
    }
    assert {name: (bar.fro * 1e3, bar.row * 1e3) for name, bar in bars.items()} == {
        name: pytest.approx(stated_bar) for name, stated_bar in stated.items()
    }
    assert all(bar.peak == 7e-3 for bar in bars.values())
    assert "off by more than 7e-3" in PAGE


def test_constants_of_fp8_weights():
    pytest.importorskip("triton")
    from mla_kernels.decode.hopper.fp8_query.softmax import HEADROOM, TAU

    tau, headroom = int(TAU.value), int(HEADROOM.value)
    assert f"passes it by {tau}, to {headroom} below that score" in PAGE
    assert f"at most 2^{tau} and the largest at least 2^{headroom}: 2^-{headroom + 9} of" in PAGE


def test_constants_of_the_algorithm():
    assert f"C = {numerics.GRID_OFFSET:.0f} " in PAGE
    assert f"if kb > k + {numerics.TAU:.0f} else" in PAGE
    assert "k = -2^20;" in PAGE and numerics.EXPONENT_FLOOR == -(2.0**20)
