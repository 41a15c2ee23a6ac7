# SPDX-License-Identifier: Apache-2.0
"""The warpgroups of the Hopper sparse kernel wait for all that they need, and never for ever."""

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from mla_kernels.sparse.hopper.kernel import hopper_sparse_kernel
from mla_kernels.sparse.hopper.launcher import CONFIGS
from mla_kernels.sparse.hopper.shares import share_split
from mla_kernels.sparse.hopper.support import choose_grid
from mla_kernels.sparse.triton.tiles import Split

from tests.kernels.warpgroups.language import run
from tests.kernels.warpgroups.mutants import without
from tests.kernels.warpgroups.orders import ORDERS, at_random
from tests.kernels.warpgroups.sm import SM
from tests.kernels.warpgroups.values import Pointer, Value

SMS, SLOTS = 4, 5000
POINTERS = [
    "kv",
    "kv_scale",
    "kv_rope",
    "slots",
    "lengths",
    "sink",
    "out",
    "lse",
    "max_logits",
    "part_acc",
    "part_sums",
]
# T, K and H: several tokens or tiles a program, and programs of one tile.
SHAPES = [(3, 600, 1), (3, 190, 70), (1, 650, 1), (5, 130, 1), (3, 64, 1), (2, 1290, 65)]
MODES = ("whole", "ranges", "shares")


def batch(r, T, K):
    """(slots, lengths or None): tokens of all, no, or some rows, with and without holes."""
    slots = r.integers(0, SLOTS, (T, K))
    for row in slots:
        row[int(r.choice([0, 1, 64, 65, K // 2, K, K])) :] = r.choice([-1, SLOTS, 7])
        row[r.random(K) < r.choice([0, 0.5])] = -1
    lengths = r.choice([-5, 0, 1, 64, 65, K // 2, K, K + 9], T) if r.integers(2) else None
    return slots, lengths


def sm_of_each_program(kv_format, mode, slots, lengths, choose, H, sm=SM):
    """(the cut of the tokens, the SM of each program)"""
    T, K = slots.shape
    row_tiles, tiles = -(-H // 64), -(-K // 64)
    split = {
        "whole": Split(1, tiles * 64),
        "ranges": Split(-(-tiles // 3), 192),
        "shares": share_split(T, row_tiles, K, SMS),
    }[mode]
    grid = choose_grid(T, H, K, kv_format, split, torch.device("cuda"))
    scalars = {
        "scale_log2": None,
        "page_stride": 64 * 576,
        "slots_stride": K,
        "num_slots": SLOTS,
        "K": K,
        "span": split.span,
        "splits": split.splits,
        "num_heads": H,
        "num_tokens": T,
    }
    arguments = {
        **{name: Pointer(name) for name in POINTERS},
        **dict.fromkeys(("q_desc", "q_rope_desc")),
        **{name: Value(x) for name, x in scalars.items()},
        **CONFIGS[kv_format],
        "FORMAT": kv_format,
        "PAGE": 64,
        "ROW": 576,
        "HAS_LENGTHS": lengths is not None,
        "HAS_SINK": True,
        "SPLIT": split.splits > 1,
        "SHARES": split.shares,
        "MAX_LOGITS": True,
    }
    memory = {"slots": slots.reshape(-1), "lengths": lengths}
    return split, [
        run(hopper_sparse_kernel, program, grid, choose, memory, sm, **arguments)
        for program in np.ndindex(grid)
    ]


@pytest.fixture(autouse=True)
def device(monkeypatch):
    of = SimpleNamespace(multi_processor_count=SMS)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: of)


def parts_of(split, T, K):
    """Of all partial results, T times split.splits, those that programs write."""
    tiles, share = -(-K // 64), split.span // 64
    if not split.shares:
        return list(range(T * split.splits))
    used = [(t * tiles + tiles - 1) // share - t * tiles // share + 1 for t in range(T)]
    return [t * split.splits + part for t in range(T) for part in range(used[t])]


@pytest.mark.parametrize("order", range(len(ORDERS)))
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kv_format", list(CONFIGS))
def test_any_order_is_right(kv_format, mode, order):
    for seed, (T, K, H) in enumerate(SHAPES):
        if mode == "shares" and share_split(T, -(-H // 64), K, SMS) is None:
            continue
        slots, lengths = batch(np.random.default_rng(seed), T, K)
        choose = ORDERS[order](random.Random(seed))
        split, sms = sm_of_each_program(kv_format, mode, slots, lengths, choose, H)
        assert not [fault for sm in sms for fault in sm.faults]
        wanted = {"out": (H * 512, range(T)), "lse": (H, range(T))}
        if split.splits > 1:
            parts = parts_of(split, T, K)
            wanted = {"part_acc": (H * 512, parts), "part_sums": (H * 2, parts)}
        for name, (size, rows) in wanted.items():
            stored = sorted(at for sm in sms for at in sm.stored[name])
            assert stored == [row * size + i for row in rows for i in range(size)]


NEEDED = {
    "bf16": {
        "WG0": ("full_a", "full_b", "full_v", "empty_p", "fence"),
        "WG1": ("full_q", "full_p_a"),
        "WG2": ("full_q", "full_p_b"),
    },
    "fp8_ds_mla": {
        "WG0": ("landed_q", "full_a", "full_b", "empty_p", "fence"),
        "WG1": ("full_q", "full_p_a", "fence"),
        "WG2": ("full_q", "full_p_b", "fence"),
    },
}


@pytest.mark.parametrize(
    ("kv_format", "warpgroup", "name"),
    [(f, w, name) for f, of in NEEDED.items() for w, names in of.items() for name in names],
)
def test_a_wait_too_few_is_found(kv_format, warpgroup, name):
    slots = np.random.default_rng(0).integers(0, SLOTS, (3, 600))
    choose = at_random(random.Random(0))
    args = (kv_format, "shares", slots, None, choose, 1)
    assert not [fault for sm in sm_of_each_program(*args)[1] for fault in sm.faults]
    try:
        _, sms = sm_of_each_program(*args, without(name, warpgroup))
    except (TypeError, AssertionError):
        return  # it read a number that was not there, or a barrier had an arrival too many
    assert any(sm.faults for sm in sms)


@pytest.mark.parametrize(
    ("warpgroup", "name"), [("WG0", "empty_out"), ("WG1", "full_out"), ("WG2", "full_out")]
)
def test_a_wait_too_few_for_a_token_is_found(warpgroup, name):
    slots = np.random.default_rng(0).integers(0, SLOTS, (9, 64))
    args = ("bf16", "whole", slots, None, at_random(random.Random(0)), 1)
    _, sms = sm_of_each_program(*args, without(name, warpgroup))
    assert any(sm.faults for sm in sms)
