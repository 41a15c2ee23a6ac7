# SPDX-License-Identifier: Apache-2.0
"""The warpgroups of the Hopper decode kernel for fp8 queries: as test_sparse_hopper.py, and which
page each product is of."""

import random

import numpy as np
import pytest
import torch
from mla_kernels.decode.hopper.fp8_query.kernel import hopper_fp8_query_kernel
from mla_kernels.decode.hopper.fp8_query.launcher import CONFIG
from mla_kernels.decode.plan.launcher import build_plan

from tests.kernels.warpgroups.language import run
from tests.kernels.warpgroups.order import Place
from tests.kernels.warpgroups.orders import ORDERS, at_random, late
from tests.kernels.warpgroups.sm import SM
from tests.kernels.warpgroups.values import Pointer, Value, unknown

PARTS = 3
POINTERS = [
    "q_scale",
    "kv_scale",
    "table",
    "seq_lens",
    "parts",
    "requests",
    "out",
    "lse",
    "part_acc",
    "part_sums",
]


def functions(program):
    """What is computed in registers, with what it reads and writes of shared memory."""

    def rescale(o_a, o_b, o_c, o_d, factors, lows):
        lows.load()
        factors.load()
        return o_a, o_b, o_c, o_d

    def store_group(
        o_a, o_b, out, part_acc, inverse, request, slot, split, splits, num_rows, column, tile
    ):
        inverse.load()
        whole = splits == 1
        row = program[0] * tile + np.arange(tile)
        at = (request if whole else slot + split) * num_rows + row
        at = at[:, None] * 512 + (column + np.arange(128))
        inverse.sm.store(out + at if whole else part_acc + at, None, (num_rows > row)[:, None])

    return {
        "rescale": rescale,
        "store_group": store_group,
        "move_reference": lambda *_: (Value(),) * 3,
        **dict.fromkeys(("weights", "lane_sums", "lowest", "in_order"), unknown),
        **dict.fromkeys(("columns", "added"), unknown),
    }


class Traced(SM):
    """`read`: where each warpgroup's tiles of each buffer that TMA fills were from, in turn.

    Rows past a request's length are cleared for P V while Q K^T may read them, whose scores are
    masked whatever they are. So they are a place of their own, which a load may not fill unfenced.
    """

    def __init__(self, *args):
        super().__init__(*args)
        self.held = {}
        self.read = {}
        self.past = {}

    def tma_load(self, desc, at, bar, tile, pred=True):
        if pred:
            self.held[tile.name] = tuple(int(x) for x in at)
        super().tma_load(desc, at, bar, tile, pred)

    def access(self, place, writes=False, by_async=False, later=False):
        name = place.name.split("[")[0]
        if not writes and place.name in self.held:
            turns = self.read.setdefault((self.me.name, name), [])
            if turns[-1:] != [self.held[place.name]]:
                turns.append(self.held[place.name])
        if writes and name in ("ring_a", "ring_b"):
            past = self.past.setdefault(place.name, Place(f"{place.name}, cleared rows"))
            if by_async:
                super().access(past, by_async=True)
            else:
                place = past
        return super().access(place, writes, by_async, later)


def sm_of_each_program(device, lens, H, s_q, causal, deterministic, choose, sm=Traced):
    """(the plan, the SM of each program)"""
    seq_lens = torch.tensor(lens, dtype=torch.int32, device=device)
    plan = build_plan(
        seq_lens, num_heads=H, s_q=s_q, deterministic=deterministic, num_parts=PARTS,
        max_seq_len=4096,
    )  # fmt: skip
    pages = max(1, max(-(-n // 64) for n in lens))
    table = np.arange(len(lens) * pages)
    rows = H * s_q
    scalars = {"scale_log2": None, "table_stride": pages, "num_rows": rows, "num_heads": H}
    arguments = {
        **{name: Pointer(name) for name in POINTERS},
        **dict.fromkeys(("q_desc", "q_rope_desc", "kv_desc", "rope_desc")),
        **{name: Value(x) for name, x in scalars.items()},
        "s_q": Value(s_q),
        **CONFIG,
        "LOAD_Q_SCALE": True,
        "LOAD_SCALE": True,
        "CAUSAL": causal and s_q > 1,
        "CHUNKED": plan.chunk > 0,
    }
    memory = {
        "table": table,
        "seq_lens": seq_lens.cpu().numpy(),
        "parts": plan.parts.flatten().cpu().numpy(),
        "requests": plan.requests.flatten().cpu().numpy(),
    }
    kernel, grid = hopper_fp8_query_kernel, (-(-rows // 64), PARTS)
    return plan, [
        run(kernel, program, grid, choose, memory, sm, functions(program), **arguments)
        for program in np.ndindex(grid)
    ]


CASES = [
    ([300, 0, 64, 1, 700], 16, 1, True),
    ([1000], 128, 1, True),
    ([65, 2, 129, 63, 128, 5, 0], 40, 2, True),
    ([900, 30], 8, 3, False),
]


def check_reads(lens, sms, programs):
    """Every tile once a row tile, by all warpgroups in one order, with its own request's query."""
    pages = max(1, max(-(-n // 64) for n in lens))
    wanted = [i * pages + n for i, length in enumerate(lens) for n in range(-(-length // 64))]
    seen = {}
    for sm, (row_tile, _) in zip(sms, programs, strict=True):
        tiles = [row // 64 for row, _ in sm.read.get(("WG0", "ring_a"), [])]
        seen.setdefault(row_tile, []).extend(tiles)
        if not tiles:
            assert not sm.read
            continue
        queries = [tiles[0] // pages]
        for tile in tiles:
            queries += [tile // pages] * (tile // pages != queries[-1])
        assert sm.read == {
            ("WG0", "query"): [(i, 64 * row_tile, 0) for i in queries],
            ("WG0", "rope_q"): [(i, 64 * row_tile, 256) for i in queries],
            ("WG0", "ring_a"): [(64 * n, 0) for n in tiles],
            ("WG1", "ring_a"): [(64 * n, 0) for n in tiles],
            ("WG0", "ring_b"): [(64 * n, 128) for n in tiles],
            ("WG2", "ring_b"): [(64 * n, 128) for n in tiles],
            ("WG0", "rope_ring"): [(64 * n, 256) for n in tiles],
        }
    assert all(sorted(tiles) == wanted for tiles in seen.values())


def check_stores(plan, rows, sms):
    """All of each result once: of whole requests, and of the splits of others."""
    _, splits, _, _ = plan.requests.T.tolist()
    whole = [i for i, n in enumerate(splits) if n == 1]
    parts = range(sum(n for n in splits if n > 1))
    wanted = {
        "out": (512, whole),
        "lse": (1, whole),
        "part_acc": (512, parts),
        "part_sums": (2, parts),
    }
    for name, (size, of) in wanted.items():
        stored = sorted(at for sm in sms for at in sm.stored.get(name, []))
        assert stored == [i * rows * size + j for i in of for j in range(rows * size)]


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("order", range(len(ORDERS)))
def test_any_order_is_right(order, deterministic, device):
    for seed, (lens, H, s_q, causal) in enumerate(CASES):
        choose = ORDERS[order](random.Random(seed))
        plan, sms = sm_of_each_program(device, lens, H, s_q, causal, deterministic, choose)
        assert not [fault for sm in sms for fault in sm.faults]
        check_reads(lens, sms, np.ndindex(-(-H * s_q // 64), PARTS))
        check_stores(plan, H * s_q, sms)


def without(what, name, warpgroup):
    """An SM on which a warpgroup never waits for a barrier, or arrives there, or has no fence."""

    class Broken(Traced):
        def lacks(self, does, bar=None):
            here = getattr(self.me, "name", None), bar and bar.name.split("[")[0]
            return (does, *here) == (what, warpgroup, name)

        def wait(self, bar, parity):
            if not self.lacks("wait", bar):
                super().wait(bar, parity)

        def arrive(self, bar, count=1, pred=True):
            if not self.lacks("arrive", bar):
                super().arrive(bar, count, pred)

        def fence(self):
            if not self.lacks("fence"):
                super().fence()

    return Broken


NEEDED = [
    *(("wait", bar, "WG0") for bar in ("full_q", "full_a", "full_b", "empty_p", "empty_out")),
    *(("wait", bar, "WG1") for bar in ("full_a", "full_p", "full_out")),
    *(("wait", bar, "WG2") for bar in ("full_b", "full_p", "full_out")),
    *(("arrive", bar, "WG0") for bar in ("full_p", "full_out")),
    *(("arrive", bar, w) for bar in ("empty_p", "empty_out") for w in ("WG1", "WG2")),
    *(("fence", None, w) for w in ("WG0", "WG1", "WG2")),
]


@pytest.mark.parametrize(("what", "name", "warpgroup"), NEEDED)
def test_what_is_missing_is_found(what, name, warpgroup, device):
    lens = [650, 30, 65, 1, 200, 5]
    args = (device, lens, 16, 1, True, False, at_random(random.Random(0)))
    assert not [fault for sm in sm_of_each_program(*args)[1] for fault in sm.faults]
    _, sms = sm_of_each_program(*args, without(what, name, warpgroup))
    assert any(sm.faults for sm in sms)


def test_a_load_too_many_is_found(device):
    class Eager(Traced):
        """Goes on loading behind its last segment."""

        def expect(self, bar, size, pred=True):
            super().expect(bar, size)

        def tma_load(self, desc, at, bar, tile, pred=True):
            super().tma_load(desc, at, bar, tile)

    choose = late("copies")(random.Random(0))
    _, sms = sm_of_each_program(device, [650, 30, 65], 16, 1, True, False, choose, Eager)
    assert any("ends before its loads" in fault for sm in sms for fault in sm.faults)
