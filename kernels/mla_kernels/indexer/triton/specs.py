# SPDX-License-Identifier: Apache-2.0
"""The specialisations of the indexer's kernels that are compiled offline."""

from typing import NamedTuple

from mla_kernels.arch import Arch
from mla_kernels.indexer.triton.cache import write_indexer_cache_kernel
from mla_kernels.indexer.triton.launcher import score_constants, score_tiles
from mla_kernels.indexer.triton.row_launchers import (
    FILL_BLOCK,
    LENGTHS_BLOCK,
    SLOTS_BLOCK,
    write_constants,
)
from mla_kernels.indexer.triton.rows import (
    chosen_values_kernel,
    fill_tail_kernel,
    lengths_kernel,
    positions_to_slots_kernel,
    token_rows_kernel,
)
from mla_kernels.indexer.triton.scores import scores_kernel
from mla_kernels.layouts import BLOCK_SIZE
from mla_kernels.offline.spec import KernelSpec

D = 128


class Scores(NamedTuple):
    """One way to call the score kernel."""

    name: str
    rows: int = 1
    heads: int = 64
    q_fp8: bool = True
    k_fp8: bool = True
    split: bool = True
    ragged: bool = False


SCORES = (
    Scores("decode"),
    Scores("decode_mtp2", rows=2),
    Scores("decode_mtp4", rows=4),
    Scores("decode_h32", heads=32),
    Scores("decode_h8", heads=8),
    Scores("decode_bf16_q", q_fp8=False),
    Scores("decode_bf16", q_fp8=False, k_fp8=False),
    Scores("decode_bf16_h20", heads=20, q_fp8=False, k_fp8=False),
    Scores("decode_bf16_mtp2", rows=2, q_fp8=False, k_fp8=False),
    Scores("decode_bf16_mtp4", rows=4, q_fp8=False, k_fp8=False),
    Scores("decode_bf16_k", k_fp8=False),
    Scores("mixed", ragged=True),
    Scores("prefill", rows=4, ragged=True, split=False),
    # Deterministic: more tiles than TILE_COUNTS has, of a row each.
    Scores("prefill_alone", ragged=True, split=False),
    Scores("prefill_bf16", rows=4, ragged=True, split=False, q_fp8=False, k_fp8=False),
)


def specialisations(arch: Arch) -> list[KernelSpec]:
    writes = [
        _write(arch, fp8, ue8m0) for fp8, ue8m0 in ((True, True), (True, False), (False, True))
    ]
    return [
        *(_scores(arch, call) for call in SCORES),
        *writes,
        _lengths(),
        _token_rows(),
        _fill_tail(),
        _slots(),
        _values(),
    ]


def _scores(arch: Arch, call: Scores) -> KernelSpec:
    tiles = score_tiles(arch, call.rows, call.heads, D, 1 if call.k_fp8 else 2)
    pointers = {
        "q_ptr": "*u8" if call.q_fp8 else "*bf16",
        "k_ptr": "*u8" if call.k_fp8 else "*bf16",
        "weights_ptr": "*fp32",
        "table_ptr": "*i32",
        "lengths_ptr": "*i32",
        "scores_ptr": "*fp32",
    }
    strides = ("stride_q_row", "stride_q_head", "stride_page", "stride_weights", "stride_scores")
    scalars = ["num_tiles", "num_rows", "max_len", "stride_table", *strides]
    unused: dict[str, int | None] = {}
    if call.ragged:
        pointers["requests_ptr"] = "*i32"
        unused["rows_per_request"] = 1
    else:
        unused["requests_ptr"] = None
        scalars.append("rows_per_request")
    return KernelSpec(
        name=f"indexer_scores/{call.name}",
        fn=scores_kernel,
        signature={**pointers, **dict.fromkeys(scalars, "i32")},
        constexprs={
            **unused,
            **score_constants(
                tiles,
                call.heads,
                D,
                num_tiles=64 if call.split else 2048,
                ragged=call.ragged,
                q_fp8=call.q_fp8,
                k_fp8=call.k_fp8,
                fp8_hardware=arch.e4m3_convert,
            ),
        },
        aligned=(*pointers, "max_len", *(s for s in strides if s != "stride_weights")),
        options=tiles.options,
        tensor_core="any",
        quick=call.name in ("decode", "prefill"),
    )


def _write(arch: Arch, fp8: bool, ue8m0: bool) -> KernelSpec:
    pointers = {"k_ptr": "*bf16", "cache_ptr": "*u8" if fp8 else "*bf16", "slots_ptr": "*i64"}
    strides = ("stride_k", "stride_page")
    return KernelSpec(
        name=f"write_indexer_cache/{('ue8m0' if ue8m0 else 'fp32') if fp8 else 'bf16'}",
        fn=write_indexer_cache_kernel,
        signature={**pointers, **dict.fromkeys(strides, "i32")},
        constexprs=write_constants(D, fp8=fp8, ue8m0=ue8m0, fp8_hardware=arch.e4m3_convert),
        aligned=(*pointers, *strides),
        options={"num_warps": 1},
        quick=ue8m0 and fp8,
    )


def _lengths() -> KernelSpec:
    pointers = ("seq_lens_ptr", "positions_ptr", "requests_ptr", "out_ptr")
    return KernelSpec(
        name="indexer_lengths/ragged",
        fn=lengths_kernel,
        signature={**dict.fromkeys(pointers, "*i32"), "num_rows": "i32"},
        constexprs={
            "rows_per_request": 1,
            "BLOCK": LENGTHS_BLOCK,
            "HAS_POSITIONS": True,
            "RAGGED": True,
        },
        aligned=pointers,
        quick=True,
    )


def _token_rows() -> KernelSpec:
    pointers = ("starts_ptr", "seq_lens_ptr", "requests_ptr", "lengths_ptr")
    scalars = ("num_requests", "num_tokens", "steps")
    return KernelSpec(
        name="token_rows",
        fn=token_rows_kernel,
        signature={**dict.fromkeys(pointers, "*i32"), **dict.fromkeys(scalars, "i32")},
        constexprs={"BLOCK": LENGTHS_BLOCK},
        aligned=pointers,
        quick=True,
    )


def _fill_tail() -> KernelSpec:
    return KernelSpec(
        name="indexer_scores/fill_tail",
        fn=fill_tail_kernel,
        signature={
            "lengths_ptr": "*i32",
            "scores_ptr": "*fp32",
            "width": "i32",
            "stride_scores": "i32",
        },
        constexprs={"PAGE": BLOCK_SIZE, "BLOCK": FILL_BLOCK},
        aligned=("lengths_ptr", "scores_ptr", "width", "stride_scores"),
        quick=True,
    )


def _slots() -> KernelSpec:
    pointers = ("positions_ptr", "table_ptr", "requests_ptr", "out_ptr")
    scalars = ("num_selected", "max_blocks", "block_size", "stride_positions", "stride_table")
    return KernelSpec(
        name="positions_to_slots/ragged",
        fn=positions_to_slots_kernel,
        signature={**dict.fromkeys(pointers, "*i32"), **dict.fromkeys(scalars, "i32")},
        constexprs={"rows_per_request": 1, "BLOCK": SLOTS_BLOCK, "RAGGED": True},
        aligned=(*pointers, "num_selected", "block_size", "stride_positions"),
        quick=True,
    )


def _values() -> KernelSpec:
    pointers = {"scores_ptr": "*fp32", "chosen_ptr": "*i32", "values_ptr": "*fp32"}
    scalars = ("num_chosen", "stride_scores", "stride_chosen", "stride_values")
    return KernelSpec(
        name="indexer_topk/values",
        fn=chosen_values_kernel,
        signature={**pointers, **dict.fromkeys(scalars, "i32")},
        constexprs={"BLOCK": SLOTS_BLOCK},
        aligned=(*pointers, *scalars),
        quick=True,
    )
