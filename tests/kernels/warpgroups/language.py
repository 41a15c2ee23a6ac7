# SPDX-License-Identifier: Apache-2.0
"""What the names in a Gluon kernel of several warpgroups mean on a modelled SM (sm.py)."""

import inspect
from types import SimpleNamespace

import numpy as np
from mla_kernels.testing.gluon_numpy import with_hardware

from tests.kernels.warpgroups.order import Barrier
from tests.kernels.warpgroups.shared import Shared
from tests.kernels.warpgroups.sm import SM
from tests.kernels.warpgroups.values import Value, known, on_values, unknown

ITEM_SIZES = {"uint8": 1, "float8e4nv": 1} | dict.fromkeys(("bfloat16", "float16", "int16"), 2)
ITEM_SIZES |= dict.fromkeys(("float32", "int32", "uint32"), 4) | {"int64": 8}
# Arithmetic of registers, and layouts.
UNKNOWN = [
    "zeros",
    "zeros_like",
    "full_like",
    "sum",
    "abs",
    "exp2",
    "log2",
    "fma",
    "reshape",
    "permute",
    "expand_dims",
    "inline_asm_elementwise",
    "atomic_max",
    "pointer_type",
    "SliceLayout",
    "DotOperandLayout",
    "BlockedLayout",
    "NVMMADistributedLayout",
    "NVMMASharedLayout",
]


def language(sm, program, grid):
    """What `gl` stands for."""
    allocated = []

    def allocate(dtype, shape, layout):
        allocated.append(Shared(sm, shape, itemsize=dtype))
        return allocated[-1]

    def warp_specialize(jobs, warps, registers):
        names = inspect.currentframe().f_back.f_locals
        barriers = []
        for name, shared in names.items():
            if isinstance(shared, Shared) and shared.tiles["name"] == "?":
                shared.tiles["name"] = name
        for shared in allocated:
            for key, barrier in shared.tiles.items():
                if isinstance(barrier, Barrier):
                    barrier.name = Shared(sm, (), shared.tiles, key).name
                    barriers.append(barrier)
        sm.run(jobs, barriers)

    return SimpleNamespace(
        allocate_shared_memory=allocate,
        warp_specialize=warp_specialize,
        program_id=lambda axis: Value(program[axis]),
        num_programs=lambda axis: Value(grid[axis]),
        to_tensor=Value,
        arange=lambda start, stop, layout: Value(np.arange(start, stop)),
        full=lambda shape, x, dtype, layout: on_values(lambda x: np.full(shape, x))(x),
        where=on_values(lambda c, a, b: np.where(c, a, b)[()]),
        minimum=on_values(np.minimum),
        maximum=on_values(np.maximum),
        max=lambda x, axis: on_values(lambda x: np.max(x, axis))(x),
        convert_layout=lambda x, layout, assert_trivial=False: x,
        multiple_of=lambda x, n: x,
        static_range=range,
        static_assert=lambda ok: None,
        load=sm.load,
        store=sm.store,
        split=lambda x: (Value(), Value()),
        **dict.fromkeys(UNKNOWN, unknown),
        **ITEM_SIZES,
    )


def convert_query(tile_a, tile_b, tile_r, num_heads):
    tile_r.load()
    for tile in (tile_a, tile_b):
        tile.load()
        tile.store(Value())
    return Value(), Value()


def rescale(acc, factors, mode):
    factors.load()
    return acc


def hardware(sm):
    return {
        "mbarrier": SimpleNamespace(
            init=lambda bar, count: bar.init(count),
            arrive=sm.arrive,
            expect=sm.expect,
            wait=sm.wait,
            MBarrierLayout=lambda: None,
        ),
        "async_copy": SimpleNamespace(
            commit_group=sm.commit_group,
            wait_group=sm.wait_group,
            mbarrier_arrive=sm.copies_arrive,
        ),
        "tma_load": sm.tma_load,
        "tma_store": sm.tma_store,
        "tma_store_wait": sm.tma_store_wait,
        "gdc_launch_dependents": lambda: None,
        "copy_to_shared": sm.copy_to_shared,
        "warpgroup_mma": sm.multiply,
        "warpgroup_mma_wait": sm.multiply_wait,
        "fence_async_shared": sm.fence,
        "cta_barrier": lambda: None,  # of one warpgroup
        "reinterpret": lambda tile, dtype, shape, layout: tile.view([int(n) for n in shape], dtype),
        # Arithmetic of registers, with what it reads and writes of shared memory.
        "convert_query": convert_query,
        "rescale": rescale,
        "next_exponent": lambda scales, exponent: scales.load(),
        "softmax_step": lambda *_: (Value(),) * 5,
        **dict.fromkeys(("power_of_two", "one_over", "times", "times_ratio", "twice_f16"), unknown),
        # The index of a loop is a tensor.
        "range": lambda *bounds: map(Value, range(*(int(known(x)) for x in bounds))),
    }


def run(kernel, program, grid, choose, memory, sm=SM, functions=None, **arguments):
    """The SM that has run one program; `memory`: the arrays whose numbers decide anything;
    `functions`: what some of the kernel's are replaced by."""
    sm = sm(choose, memory)
    sm.program = program
    with_hardware(kernel, language(sm, program, grid), hardware(sm) | (functions or {}))(
        **arguments
    )
    return sm
