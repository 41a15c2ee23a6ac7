# SPDX-License-Identifier: Apache-2.0
"""The Hopper dense kernels on modelled SMs."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from mla_kernels.decode.hopper.bf16.kernel import hopper_decode_kernel
from mla_kernels.decode.hopper.bf16.launcher import CONFIG, MOST_ROWS_IN_ONE_LOOP
from mla_kernels.decode.hopper.fp8.configs import choose_config
from mla_kernels.decode.hopper.fp8.kernel import hopper_fp8_kernel
from mla_kernels.decode.plan.launcher import DevicePlan, build_plan

from tests.kernels.warpgroups.language import run
from tests.kernels.warpgroups.sm import SM
from tests.kernels.warpgroups.values import Pointer, Value, unknown

PAGES = 8  # of a request, at most
DESCRIPTORS = ("q_desc", "q_rope_desc", "kv_desc", "kv_rope_desc", "rope_desc", "scale_desc")
POINTERS = ["table", "seq_lens", "parts", "requests", "out", "lse", "part_acc", "part_sums"]


class Reader(SM):
    """Notes what TMA had loaded, (descriptor, first row, ...), where warpgroups read."""

    def __init__(self, choose, memory):
        super().__init__(choose, memory)
        self.read = {}  # by warpgroup and ring

    def tma_load(self, desc, at, bar, tile, pred=True):
        if pred:
            tile.place.loaded = (desc, *(int(i) for i in at))
        super().tma_load(desc, at, bar, tile, pred)

    def tma_store(self, desc, at, tile):
        tile.place.loaded = None
        super().tma_store(desc, at, tile)

    def access(self, place, writes=False, by_async=False, later=False):
        loaded = getattr(place, "loaded", None)
        if not writes and loaded:
            ring = place.name.split("[")[0]
            self.read.setdefault((self.me.name, ring), []).append(loaded)
        return super().access(place, writes, by_async, later)


def load_query(q_desc, q_rope_desc, request, query, query_rope, full):
    """Of fp8, block by block, whatever it is loaded in."""
    sm, N = query.sm, query.shape[1]
    sm.expect(full, N * 576 * 2)
    for i in range(8):
        sm.tma_load(q_desc, [request, N * sm.program[0], 64 * i], full, query.index(i))
    rope = query_rope.index(query_rope.shape[0] - 1)
    sm.tma_load(q_rope_desc, [request, N * sm.program[0], 0], full, rope)


def convert_query(query, query_rope, tops, full_tops, phase, zero, ME, SCALE_OF):
    sm = query.sm
    blocks = [query.index(4 * ME + i) for i in range(4)]
    if ME == 1:
        blocks.append(query_rope.index(query_rope.shape[0] - 1))
    for block in blocks:
        block.load()
    tops.index(ME).store(Value())
    sm.arrive(full_tops)
    sm.wait(full_tops, phase)
    tops.index(1 - ME).load()
    for block in blocks:
        block.load()
        block.store(Value())
    return Value()


def any_moves(above, limit, votes):
    votes.store(Value())
    votes.load()
    return Value()


def store_planes(p, scales, inverse, p_ring, slot):
    for group in range(4):
        p_ring.index(4 * slot + group).store(Value())


def rescale(o_a, o_b, o_c, o_d, factors, moved, N):
    moved.load()
    factors.load()
    return o_a, o_b, o_c, o_d


# Functions whose shapes matter, with what they read and write of shared memory.
BF16 = {"softmax_step": lambda *_: (Value(),) * 4}
FP8 = {
    "load_query": load_query,
    "convert_query": convert_query,
    "any_moves": any_moves,
    "store_planes": store_planes,
    "rescale": rescale,
    "at_factors": lambda sums, factors: factors.load(),
    "load_scale": lambda scales, group, layout: scales.load(),
    "eights": lambda o: (Value(),) * 8,
    **dict.fromkeys(("pair_max", "most_of_warps", "along_pairs", "of_pairs", "of_rows"), unknown),
    **dict.fromkeys(("scaled", "mma_v2", "integer_reference", "pow2_int"), unknown),
}


@dataclass
class Step:
    """`H` heads and `s_q` queries a request, of `lengths`."""

    kv_format: str
    H: int
    s_q: int
    lengths: list[int]
    parts: int
    deterministic: bool = False
    rescale: str = "pow2"

    def __post_init__(self):
        self.rows = self.H * self.s_q
        lengths = torch.tensor(self.lengths, dtype=torch.int32)
        self.plan: DevicePlan = build_plan(
            lengths,
            num_heads=self.H,
            s_q=self.s_q,
            num_parts=self.parts,
            deterministic=self.deterministic,
        )
        self.full = self.kv_format == "bf16" and self.rows % 64 == 0
        self.full &= not (self.s_q > 1 and self.deterministic)
        self.config = CONFIG
        self.tile = 64
        if self.kv_format != "bf16":
            self.config = choose_config(self.rows, self.kv_format)
            self.tile = self.config["N"]

    @property
    def grid(self):
        return -(-self.rows // self.tile), self.parts

    def arguments(self):
        results = ("out", "part_acc") if self.full else ()
        scalars = {"table_stride": PAGES, "num_rows": self.rows}
        scalars |= {"num_heads": self.H, "s_q": self.s_q}
        given: dict[str, Any] = {name: name for name in (*DESCRIPTORS, *results)}
        given |= {name: Pointer(name) for name in POINTERS if name not in results}
        given |= {name: Value(x) for name, x in scalars.items()}
        given |= {"scale_log2": Value(), "kv_scale": Value(), "LOAD_SCALE": False}
        given |= {"FULL": self.full, "PEELED": self.rows > MOST_ROWS_IN_ONE_LOOP}
        given |= {"CAUSAL": self.s_q > 1, "CHUNKED": self.deterministic}
        return given | self.config | {"RESCALE": self.rescale}

    def run(self, choose, sm=Reader):
        """The SM of each program, by its place in the grid."""
        memory = {
            "table": np.arange(len(self.lengths) * PAGES),
            "seq_lens": np.array(self.lengths),
            "parts": self.plan.parts.numpy().reshape(-1),
            "requests": self.plan.requests.numpy().reshape(-1),
        }
        kernel, functions = hopper_fp8_kernel, FP8
        if self.kv_format == "bf16":
            kernel, functions = hopper_decode_kernel, BF16
        given = self.arguments()
        given = {name: given[name] for name in kernel.arg_names}
        return {
            program: run(kernel, program, self.grid, choose, memory, sm, functions, **given)
            for program in np.ndindex(self.grid)
        }
