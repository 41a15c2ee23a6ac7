# SPDX-License-Identifier: Apache-2.0
"""The warpgroups of the Hopper dense kernels wait for all that they need, and never for ever."""

import random
from itertools import groupby

import pytest
from mla_kernels.decode.plan import launcher

from tests.kernels.warpgroups.dense import PAGES, Reader, Step
from tests.kernels.warpgroups.mutants import without
from tests.kernels.warpgroups.orders import ORDERS, at_random, late

# KV format, H, s_q and how O moves.
KERNELS = {
    "bf16": ("bf16", 16, 1, "pow2"),
    "bf16 amla": ("bf16", 16, 1, "amla"),
    "bf16 full": ("bf16", 64, 1, "pow2"),
    "bf16 peeled": ("bf16", 65, 2, "pow2"),
    "fp8 16": ("fp8", 16, 1, "pow2"),
    "fp8 32": ("fp8", 15, 2, "pow2"),
    "fp8 64": ("fp8", 33, 1, "pow2"),
    "fp8_ds_mla 16": ("fp8_ds_mla", 7, 2, "pow2"),
    "fp8_ds_mla 32": ("fp8_ds_mla", 32, 1, "pow2"),
    "fp8_ds_mla 64": ("fp8_ds_mla", 64, 1, "pow2"),
}
# Lengths, parts, and whether they are cut in chunks: several requests a program and several
# programs a request, requests of nothing or one tile, programs without work.
BATCHES = [
    ([130, 0, 64, 300, 1, 65], 2, False),
    ([64, 64, 0, 1, 64, 63, 129, 64, 64], 1, False),
    ([400, 1, 0, 0, 192], 2, True),
    ([0, 64, 0], 2, True),
    ([0, 0], 1, False),
]


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch):
    monkeypatch.setattr(launcher, "CHUNK", 1)


def steps(kernel):
    kv_format, H, s_q, rescale = KERNELS[kernel]
    for lengths, parts, chunks in BATCHES:
        yield Step(kv_format, H, s_q, lengths, parts, chunks, rescale)


def tiles_read(sm, warpgroup, ring, name, column):
    """(request, tile) in order, of one half of the cache."""
    read = [x for x in sm.read.get((warpgroup, ring), []) if x[0] == name]
    assert all(at[2] == column for at in read)
    return [divmod(at[1] // 64, PAGES) for at, _ in groupby(read)]


def queries_read(sm, warpgroup, ring):
    """The request of each segment and its first row."""
    read = [x[1:3] for x in sm.read.get((warpgroup, ring), []) if x[0] == "q_desc"]
    return [at for at, _ in groupby(read)]


def tiles_of(step, sm, row_tile):
    """The tiles that a program has multiplied; all its warpgroups have read the same."""
    upper = 256 if step.kv_format == "bf16" else 128
    tiles = tiles_read(sm, "WG1", "ring_a", "kv_desc", 0)
    assert tiles_read(sm, "WG2", "ring_b", "kv_desc", upper) == tiles
    for ring, column in (("ring_a", 0), ("ring_b", upper)):
        first = tiles_read(sm, "WG0", ring, "kv_desc", column)
        if step.kv_format == "bf16":
            assert first == tiles
        else:
            assert [first, tiles_read(sm, "WG3", ring, "kv_desc", column)] == [
                tiles[0::2],
                tiles[1::2],
            ]
    query = "ring_a" if step.kv_format == "bf16" else "query"
    rows = row_tile * step.tile
    segments = [(request, rows) for request, _ in groupby(request for request, _ in tiles)]
    assert queries_read(sm, "WG0", query) == segments
    return tiles


def check_results(step, sms):
    """Each result is written once, and no other place."""
    splits = [row[:2] for row in step.plan.requests.tolist()]
    whole = [i for i, (_, n) in enumerate(splits) if n == 1]
    partial = [slot + i for slot, n in splits if n > 1 for i in range(n)]
    columns = 512 if step.kv_format == "bf16" else 256  # in pairs
    for name, size, wanted in (
        ("out", columns, whole),
        ("lse", 1, whole),
        ("part_acc", columns, partial),
        ("part_sums", 2, partial),
    ):
        size *= step.rows
        stored = sorted(at for sm in sms.values() for at in sm.stored.get(name, []))
        assert stored == [row * size + i for row in sorted(wanted) for i in range(size)]


@pytest.mark.parametrize("order", range(len(ORDERS) + 1))
@pytest.mark.parametrize("kernel", KERNELS)
def test_any_order_is_right(kernel, order):
    for seed, step in enumerate(steps(kernel)):
        sms = step.run([*ORDERS, late("WG3")][order](random.Random(seed)))
        assert not [fault for sm in sms.values() for fault in sm.faults]
        for row_tile in range(step.grid[0]):
            read = [tiles_of(step, sms[row_tile, part], row_tile) for part in range(step.parts)]
            assert sorted(tile for tiles in read for tile in tiles) == [
                (request, tile)
                for request, length in enumerate(step.lengths)
                for tile in range(-(-length // 64))
            ]
        check_results(step, sms)


# What each warpgroup may not leave out.
RINGS = ["full_a", "full_b"]
SCORES = ["fence in scores_warpgroup", "product in scores_warpgroup"]
VALUES = ["full_p_a", "full_q", "full_out", "product in add_tile", "fence in clear_rows_past"]
BF16 = {
    "WG0": [*RINGS, "empty_p", "empty_out", "fence in take_query", *SCORES],
    "WG1": VALUES,
    "WG2": ["full_p_b", *VALUES[1:]],
}
FULL = {name: ["fence in store_tile", "stores"] for name in ("WG1", "WG2")}
BOTH = [*RINGS, "full_q", "full_tops", "ready_q", "decided", "empty_p", SCORES[0]]
# P^T of a tile is there only if the tile is: no value warpgroup needs its wait for full_a or b.
EITHER = ["full_p", "full_out", "fence in clear_rows_past", "product in add_values"]
FP8 = {"WG0": [*BOTH, "full_sums", "empty_out"], "WG1": EITHER, "WG2": EITHER, "WG3": BOTH}
TOKEN = {name: ["product in group_scores"] for name in ("WG0", "WG3")}
TILE = {name: ["product in tile_scores", "fence in scale_rope"] for name in ("WG0", "WG3")}
NEEDED = [
    ("bf16", BF16),
    ("bf16 full", FULL),
    ("fp8 16", FP8),
    ("fp8_ds_mla 16", TOKEN),
    ("fp8_ds_mla 64", TILE),
]


@pytest.mark.parametrize(
    ("kernel", "warpgroup", "name"),
    [(k, w, name) for k, of in NEEDED for w, names in of.items() for name in names],
)
def test_what_is_left_out_is_found(kernel, warpgroup, name):
    kv_format, H, s_q, rescale = KERNELS[kernel]
    lengths = [130, 0, 64, 300, 1, 65, 20, 500, 64, 64, 64]
    step = Step(kv_format, H, s_q, lengths, 1, False, rescale)
    broken = without(name, warpgroup, Reader)
    for order in (at_random, late("WG0"), late("copies")):
        try:
            sms = step.run(order(random.Random(0)), broken)
        except AssertionError as error:
            assert "more arrivals than" in str(error)
            return
        if any(sm.faults for sm in sms.values()):
            return
    pytest.fail("not found")
