# SPDX-License-Identifier: Apache-2.0
"""The specialisations of the Hopper score kernels, for the offline compiler."""

from mla_kernels.arch import Arch
from mla_kernels.indexer.hopper import scores, several
from mla_kernels.indexer.hopper.launcher import OPTIONS, SEVERAL, constants, several_constants
from mla_kernels.offline.spec import KernelSpec

POINTERS = {
    "q_ptr": "*u8",
    "weights_ptr": "*fp32",
    "table_ptr": "*i32",
    "lengths_ptr": "*i32",
    "scores_ptr": "*fp32",
}
STRIDES = ("stride_q_row", "stride_q_head", "stride_scores")
LEVEL1 = ("level1_ptr", "stride_level1")
SCALARS = ("num_rows", "max_len", "stride_weights", "stride_table", *STRIDES)
SEVERAL_SCALARS = ("num_tiles", "rows_per_request", *SCALARS)
DESCRIPTORS = {
    "keys_desc": f"tensordesc<u8[64, 128],{scores.KEYS.value!r}>",
    "scales_desc": f"tensordesc<u8[2, 128],{scores.SCALES.value!r}>",
}


def specialisations(arch: Arch) -> list[KernelSpec]:
    if arch.sm != 90:
        return []
    one_row = [
        KernelSpec(
            name=f"indexer_scores/hopper/h{heads}_rows{rows}{'_topk' if topk else ''}",
            fn=scores.hopper_scores_kernel,
            signature=DESCRIPTORS
            | POINTERS
            | dict.fromkeys(SCALARS, "i32")
            | ({"level1_ptr": "*i32", "stride_level1": "i32"} if topk else {}),
            constexprs=constants(rows, heads)
            | ({} if topk else {"level1_ptr": None, "stride_level1": 0}),
            aligned=(*POINTERS, "max_len", *STRIDES, *(LEVEL1 if topk else ())),
            options=OPTIONS,
            tensor_core="native",
            quick=topk,
        )
        for heads, rows, topk in ((64, 64, True), (64, 1, False), (32, 1024, False))
    ]
    return one_row + [
        _several(rows, ragged, topk)
        for rows, ragged in ((2, False), (3, False), (4, False), (1, True), (4, True))
        for topk in (False, True)
    ]


def _several(rows: int, ragged: bool, topk: bool) -> KernelSpec:
    """Of 100 tiles and 64 heads."""
    pointers = POINTERS | ({"requests_ptr": "*i32"} if ragged else {})
    return KernelSpec(
        name=f"indexer_scores/hopper_several/rows{rows}{'_ragged' * ragged}{'_topk' * topk}",
        fn=several.hopper_several_scores_kernel,
        signature=DESCRIPTORS
        | pointers
        | dict.fromkeys(SEVERAL_SCALARS, "i32")
        | ({"level1_ptr": "*i32", "stride_level1": "i32"} if topk else {}),
        constexprs=several_constants(rows, 100, 64)
        | ({} if ragged else {"requests_ptr": None})
        | ({} if topk else {"level1_ptr": None, "stride_level1": 0}),
        aligned=(*pointers, "max_len", *STRIDES, *(LEVEL1 if topk else ())),
        options={"num_warps": 4, "maxnreg": SEVERAL[rows][1]},
        tensor_core="native",
        quick=topk and ragged and rows == 4,
    )
