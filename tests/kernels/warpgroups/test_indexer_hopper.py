# SPDX-License-Identifier: Apache-2.0
"""The Hopper score kernel waits for its loads and products, and its warps for each other. Numbers:
tests/kernels/indexer/test_hopper_logic.py."""

import functools
import inspect
import random

import numpy as np
import pytest
from mla_kernels.indexer.hopper.launcher import ONE, TWO_F16, TWO_FP8, constants
from mla_kernels.indexer.hopper.scores import hopper_scores_kernel
from mla_kernels.testing.gluon_numpy import with_hardware

from tests.kernels.warpgroups.language import hardware, language
from tests.kernels.warpgroups.orders import at_random, late
from tests.kernels.warpgroups.sm import SM
from tests.kernels.warpgroups.values import Pointer, Value, on_values, unknown

BUFFERS = ("keys", "q_shared", "scales", "weights", "full")  # in the order of their allocation
POINTERS = ("q_ptr", "weights_ptr", "table_ptr", "lengths_ptr", "scores_ptr")


class Warps(SM):
    """One warpgroup, any of whose warps may be ahead: what it read, wrote or waited for is known to
    all warps behind a barrier of theirs, and a fence is for what a warp itself wrote before it."""

    apart = 0

    def barrier(self):
        self.me.known.events |= self.apart
        self.apart = 0

    def part(self, bits):
        self.me.known.events &= ~bits
        self.apart |= bits

    def access(self, place, writes=False, by_async=False, later=False):
        # What is written with no barrier between are parts of a tile, as of each row's query.
        parts = []
        if writes and not by_async and all(e.writes and e.bit & self.apart for e in place.events):
            parts, place.events = place.events, parts
        event = super().access(place, writes, by_async, later)
        place.events[:0] = parts
        if not later:
            self.part(event.bit)
        return event

    def wait(self, bar, parity):
        super().wait(bar, parity)
        self.part(bar.barrier.waits[self.me.name][-1][1])

    def multiply_wait(self, pending, deps):
        known = self.me.known.events
        super().multiply_wait(pending, deps)
        self.part(self.me.known.events & ~known)
        return (Value(),) * len(deps) if len(deps) > 1 else Value()

    def fence(self):
        self.me.known.fenced |= self.apart


def run(program, programs, choose, memory, sm=Warps, **arguments):
    """The SM that has run one program."""
    sm = sm(choose, memory)
    buffers = []
    gl = language(sm, (program,), (programs,))
    allocate = gl.allocate_shared_memory

    def named(*how):
        buffers.append(allocate(*how))
        buffers[-1].tiles["name"] = BUFFERS[len(buffers) - 1]
        return buffers[-1]

    vars(gl).update(
        allocate_shared_memory=named,
        sum=lambda x, axis: on_values(lambda x: np.sum(x, axis))(x),
        cdiv=on_values(lambda a, b: -(-a // b)),
        associative_scan=lambda x, axis, add: on_values(np.cumsum)(x),
        maximum=lambda a, b, propagate_nan=None: on_values(np.maximum)(a, b),
        convert_layout=lambda x, layout, assert_trivial=False: x,
        split=lambda x: (Value(), Value()),
        **dict.fromkeys(("NVMMADistributedLayout", "DotOperandLayout"), unknown),
    )
    names = {**hardware(sm), "cta_barrier": sm.barrier, "operand": unknown}
    job = functools.partial(with_hardware(hopper_scores_kernel, gl, names), **arguments), ()
    sm.run([job], [])
    for i in range(buffers[-1].shape[0]):
        sm.faults += buffers[-1].index(i).barrier.faults()
    return sm


def sm_of_each_program(lengths, requests, tile, fp8, choose, programs=3, sm=Warps):
    """`requests`: of each row, -1 for padding; or how many rows each request has."""
    ragged = not isinstance(requests, int)
    T, max_blocks = len(lengths), 12
    B = max(requests) + 1 if ragged else T // requests
    tiles = -(-T // tile.rows) if ragged else B * -(-requests // tile.rows)
    scalars = {
        "num_tiles": tiles,
        "num_rows": T,
        "rows_per_request": 1 if ragged else requests,
        "max_len": 64 * max_blocks,
        "stride_q_row": 64 * 128,
        "stride_q_head": 128,
        "stride_weights": 64,
        "stride_table": max_blocks,
        "stride_scores": 64 * max_blocks,
    }
    arguments = {
        **{name: Pointer(name) for name in POINTERS},
        "requests_ptr": Pointer("requests_ptr") if ragged else None,
        **dict.fromkeys(("keys_desc", "scales_desc")),
        **{name: Value(x) for name, x in scalars.items()},
        **constants(tile, tiles, 64, fp8_products=fp8),
    }
    memory = {
        "table_ptr": np.arange(B * max_blocks),
        "lengths_ptr": np.array(lengths),
        "requests_ptr": np.array(requests),
    }
    return [run(i, programs, choose, memory, sm, **arguments) for i in range(programs)]


TILES = [(ONE, False), (TWO_F16, False), (ONE, True), (TWO_FP8, True)]
PADDED = [0, 0, 1, -1, 3, 2, 2, 4]
ROWS = [
    ([300, 0, 64, 1, 768, 65], 1),
    ([300, 301, 302, 0, 0, 1, 63, 64, 65], 3),
    ([300, 301, 65, 9, 700, 130, 129, 1], PADDED),
    ([1] * 9, [0] * 9),
]


@pytest.mark.parametrize("order", [at_random, late("copies"), late("WG0")])
@pytest.mark.parametrize(("tile", "fp8"), TILES)
def test_any_order_is_right(tile, fp8, order):
    for seed, (lengths, requests) in enumerate(ROWS):
        if tile == ONE and requests == 3:
            continue  # a tile is a request
        sms = sm_of_each_program(lengths, requests, tile, fp8, order(random.Random(seed)))
        assert not [fault for sm in sms for fault in sm.faults]
        ends = [-(-length // 64) * 64 for length in lengths]
        if requests == PADDED:
            ends[requests.index(-1)] = 0
        wanted = [row * 768 + i for row, end in enumerate(ends) for i in range(end)]
        assert sorted(at for sm in sms for at in sm.stored.get("scores_ptr", [])) == wanted


def without(what, where):
    """An SM on which a function of the kernel does not do this."""

    class Broken(Warps):
        def lacks(self, name):
            function = inspect.currentframe().f_back.f_back.f_code.co_name
            return (name, function) == (what, where)

        def wait(self, bar, parity):
            if not self.lacks("wait"):
                super().wait(bar, parity)

        def fence(self):
            if not self.lacks("fence"):
                super().fence()

        def barrier(self):
            if not self.lacks("barrier"):
                super().barrier()

        def multiply_wait(self, pending, deps):
            if self.lacks("multiply_wait"):
                return (Value(),) * len(deps) if len(deps) > 1 else Value()
            return super().multiply_wait(pending, deps)

    return Broken


NEEDED = [
    ("wait", "score_pages"),
    ("fence", "load_queries"),
    ("barrier", "load_queries"),
    ("barrier", "score_pages"),
    ("multiply_wait", "score_pages"),
]
CASES = [(*needed, *tile) for needed in NEEDED for tile in TILES]
# Of one product a page, the barrier behind that is behind the last use of the queries, too.
CASES.append(("barrier", "hopper_scores_kernel", TWO_F16, False))


@pytest.mark.parametrize(("what", "where", "tile", "fp8"), CASES)
def test_what_is_missing_is_found(what, where, tile, fp8):
    choose = at_random(random.Random(0))
    args = [300, 300, 65, 9, 768, 130], [0, 0, 1, 2, 3, 3], tile, fp8, choose
    assert not [fault for sm in sm_of_each_program(*args) for fault in sm.faults]
    try:
        sms = sm_of_each_program(*args, sm=without(what, where))
    except AssertionError:
        return  # a barrier had an arrival too many
    assert any(sm.faults for sm in sms)
