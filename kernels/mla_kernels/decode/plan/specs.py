# SPDX-License-Identifier: Apache-2.0
"""The specialisations of the plan kernel, for the offline compiler."""

from mla_kernels.arch import Arch
from mla_kernels.decode.plan.kernel import PLAN_TILE, plan_kernel
from mla_kernels.decode.plan.launcher import CHUNK, MAX_CHUNKS, MIN_PAY, OVERHEAD, SLACK, SPARE
from mla_kernels.offline.spec import KernelSpec


def specialisations(arch: Arch) -> list[KernelSpec]:
    names = ("lens_ptr", "parts_ptr", "requests_ptr", "outgrown_ptr")
    pointers = dict.fromkeys(names, "*i32")
    return [
        KernelSpec(
            name=f"plan/{'chunked' if chunk else 'spare' if spare else 'free'}",
            fn=plan_kernel,
            signature={**pointers, "B": "i32"},
            constexprs={
                "TILE": PLAN_TILE,
                "PARTS": 132,
                "PARTS_POW2": 256,
                "ROW_TILES": 2,
                "OVERHEAD": OVERHEAD,
                "MIN_PAY": MIN_PAY,
                "SLACK": SLACK,
                "SPARE": spare,
                "CHUNK": chunk,
                "MAX_CHUNKS": MAX_CHUNKS,
                "ROOM": MAX_CHUNKS,
                "BLOCK": 128,
            },
            aligned=tuple(pointers),
            options={"num_warps": 4},
            quick=chunk == spare == 0,
        )
        for chunk, spare in ((0, 0), (0, SPARE), (CHUNK, 0))
    ]
