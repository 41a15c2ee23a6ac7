# SPDX-License-Identifier: Apache-2.0
"""The specialisations of the merge kernel, for the offline compiler."""

from mla_kernels.arch import Arch
from mla_kernels.decode.merge.kernel import merge_kernel
from mla_kernels.decode.merge.launcher import MergeTile
from mla_kernels.layouts import MlaDims
from mla_kernels.offline.spec import KernelSpec

# (tile, splits in order): even batches, then deterministic mode.
TILES = (
    (MergeTile(2, 512, 4), False),
    (MergeTile(1, 32, 128), False),
    (MergeTile(8, 256, 2), True),
    (MergeTile(1, 256, 8), True),
)


def specialisations(arch: Arch) -> list[KernelSpec]:
    pointers = {
        "part_acc_ptr": "*fp32",
        "part_sum_ptr": "*fp32",
        "requests_ptr": "*i32",
        "out_ptr": "*bf16",
        "lse_ptr": "*fp32",
    }
    return [
        KernelSpec(
            name=f"merge/{tile.rows}x{tile.cols}x{tile.splits}{'_ordered' if ordered else ''}",
            fn=merge_kernel,
            signature={**pointers, "num_rows": "i32"},
            constexprs={
                "DV": MlaDims().kv_lora_rank,
                "ROWS": tile.rows,
                "COLS": tile.cols,
                "SPLITS": tile.splits,
                "ORDERED": ordered,
                "PDL": arch.programmatic_launch,
            },
            aligned=tuple(pointers),
            options={"num_warps": 4, "launch_pdl": arch.programmatic_launch},
            quick=tile == TILES[0][0],
        )
        for tile, ordered in TILES
    ]
