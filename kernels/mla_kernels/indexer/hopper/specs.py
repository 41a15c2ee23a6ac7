# SPDX-License-Identifier: Apache-2.0
"""The specialisations of the Hopper score kernel, for the offline compiler."""

from mla_kernels.arch import Arch
from mla_kernels.indexer.hopper.launcher import ONE, TWO_F16, TWO_FP8, RowTile, constants
from mla_kernels.indexer.hopper.layouts import KEYS, SCALES
from mla_kernels.indexer.hopper.scores import hopper_scores_kernel
from mla_kernels.offline.spec import KernelSpec

POINTERS = {
    "q_ptr": "*u8",
    "weights_ptr": "*fp32",
    "table_ptr": "*i32",
    "lengths_ptr": "*i32",
    "scores_ptr": "*fp32",
}
DESCRIPTORS = {
    "keys_desc": f"tensordesc<u8[64, 128],{KEYS.value!r}>",
    "scales_desc": f"tensordesc<u8[2, 128],{SCALES.value!r}>",
}
STRIDES = ("stride_q_row", "stride_q_head", "stride_scores")
SCALARS = (
    "num_tiles",
    "num_rows",
    "rows_per_request",
    "max_len",
    "stride_weights",
    "stride_table",
    *STRIDES,
)


def specialisations(arch: Arch) -> list[KernelSpec]:
    if arch.sm != 90:
        return []
    return [
        _spec(tile, fp8, tiles=tiles, heads=heads, ragged=ragged)
        for fp8, of_rows in ((False, (ONE, TWO_F16)), (True, (ONE, TWO_FP8)))
        for tile in of_rows
        for tiles, heads, ragged in ((100, 64, False), (2000, 64, True), (100, 32, False))
    ]


def _spec(tile: RowTile, fp8: bool, *, tiles: int, heads: int, ragged: bool) -> KernelSpec:
    pointers = POINTERS | ({"requests_ptr": "*i32"} if ragged else {})
    name = f"{'fp8' if fp8 else 'f16'}_rows{tile.rows}_h{heads}{'_ragged' * ragged}"
    return KernelSpec(
        name=f"indexer_scores/hopper/{name}",
        fn=hopper_scores_kernel,
        signature=DESCRIPTORS | pointers | dict.fromkeys(SCALARS, "i32"),
        constexprs=constants(tile, tiles, heads, fp8_products=fp8)
        | ({} if ragged else {"requests_ptr": None}),
        aligned=(*pointers, "max_len", *STRIDES),
        options=tile.options,
        tensor_core="native",
        quick=heads == 64 and tile.rows == 2 and ragged != fp8,
    )
