# SPDX-License-Identifier: Apache-2.0
"""The specialisations of the few-rows sparse kernel that are compiled offline."""

from mla_kernels.arch import Arch
from mla_kernels.layouts import BLOCK_SIZE, Fp8DsMlaLayout
from mla_kernels.offline.spec import KernelSpec
from mla_kernels.sparse.triton.few_rows.kernel import few_rows_sparse_kernel
from mla_kernels.sparse.triton.few_rows.launcher import tile_constants
from mla_kernels.sparse.triton.few_rows.tiles import few_rows_tile

STRIDES = ("q_stride_t", "q_stride_h", "q_rope_stride_t", "q_rope_stride_h")
SCALARS = ("slots_stride", "page_step", "num_slots", "K", "num_heads", "span")
POINTERS = {
    "q_ptr": "*bf16",
    "q_rope_ptr": "*bf16",
    "kv_ptr": "*bf16",
    "scale_ptr": "*fp32",
    "slots_ptr": "*i32",
    "lengths_ptr": "*i32",
    "sink_ptr": "*fp32",
    "out_ptr": "*bf16",
    "lse_ptr": "*fp32",
    "part_acc_ptr": "*fp32",
    "part_sum_ptr": "*fp32",
}


def specialisations(arch: Arch) -> list[KernelSpec]:
    tile = few_rows_tile(arch)
    if tile is None:
        return []
    constants = tile_constants(tile, BLOCK_SIZE, Fp8DsMlaLayout().row_bytes // 2)
    return [
        KernelSpec(
            name=f"sparse_few_rows/fp8_ds_mla/m{tile.rows}/{'split' if split else 'whole'}",
            fn=few_rows_sparse_kernel,
            signature={
                **POINTERS,
                "scale_log2": "fp32",
                **dict.fromkeys((*STRIDES, *SCALARS), "i32"),
            },
            constexprs={
                **constants,
                "HAS_LENGTHS": split,
                "HAS_SINK": not split,
                "SPLIT": split,
                "PDL": arch.programmatic_launch,
            },
            aligned=(*POINTERS, *STRIDES),
            options={"num_warps": tile.warps, "maxnreg": tile.max_registers},
            tensor_core="any",
            quick=split,
        )
        for split in (False, True)
    ]
