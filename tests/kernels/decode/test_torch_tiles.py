# SPDX-License-Identifier: Apache-2.0
"""Which tokens of which requests the torch decode takes together."""

import pytest
from mla_kernels.decode.torch_tiles import tiles_by_length

UNIT, TOKENS = 64, 2048


def tiles(lengths, hidden=0):
    return list(tiles_by_length(lengths, hidden=hidden, unit=UNIT, tokens=TOKENS))


@pytest.mark.parametrize("hidden", [0, 3])
@pytest.mark.parametrize(
    "lengths",
    [[1], [280], [5000], [280] * 3, [900, 300], list(range(1024, 64, -30)), [64] * 40, [65, 1, 0]],
)
def test_each_token_once_in_tiles_of_bounded_size(lengths, hidden):
    seen = [0] * len(lengths)
    for t in tiles(lengths, hidden):
        assert t.first % UNIT == 0 and t.start <= t.whole <= t.stop
        width = t.end - t.first
        assert width <= UNIT or width * (t.stop - t.start) <= TOKENS
        for i in range(t.start, t.stop):
            assert seen[i] == t.first < lengths[i]
            assert (t.end + hidden <= lengths[i]) == (i < t.whole)
            seen[i] = min(t.end, lengths[i])
    assert seen == lengths


@pytest.mark.parametrize("lengths", [[65], [100], [280], [2048], [280] * 7, [64] * 32])
def test_requests_of_one_length_are_one_tile_if_they_fit(lengths):
    """Whatever the length: the tile ends with them."""
    assert len(tiles(lengths)) == 1


def test_a_long_request_goes_on_alone():
    assert [(t.stop, t.end) for t in tiles([2000, 60, 60, 60])] == [(4, 64), (1, 2000)]
