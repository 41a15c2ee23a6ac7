# SPDX-License-Identifier: Apache-2.0
"""The specialisations of the portable decode kernel that are compiled offline."""

from collections.abc import Iterator
from itertools import product

import torch

from mla_kernels.arch import Arch
from mla_kernels.decode.triton.kernel import mla_decode_kernel
from mla_kernels.decode.triton.launcher import (
    kernel_constants,
    tile_constants,
    tile_options,
)
from mla_kernels.decode.triton.support import DIMS
from mla_kernels.decode.triton.tiles import Tile, choose_tile
from mla_kernels.layouts import BLOCK_SIZE, Fp8DsMlaLayout, MlaDims
from mla_kernels.offline.spec import KernelSpec

ROWS = (16, 32, 64)
# Tokens a page, other than BLOCK_SIZE.
PAGES = (16, 32, 128)
SCALARS = ("table_stride", "num_rows", "num_heads", "s_q")
STRIDES = ("q_stride_b", "q_stride_s", "q_stride_h", "page_stride")
CACHE_POINTER = {"float": "bf16", "fp8": "u8", "fp8_ds_mla": "u8"}
CACHE_PLACES = ("kv_ptr", "kv_scale_view_ptr", "kv_rope_view_ptr", "page_stride")
# Bytes that divide where rows start, other than 16.
ALIGNMENTS = {"float": (2, 4, 8), "fp8": (1, 2, 4, 8), "fp8_ds_mla": (4, 8)}


def specialisations(arch: Arch) -> list[KernelSpec]:
    return list(_decode(arch))


def _decode(arch: Arch) -> Iterator[KernelSpec]:
    for kv_format, rows in product(CACHE_POINTER, ROWS):
        if not _served_by_fewer(arch, rows, kv_format):
            yield from _modes(arch, rows, kv_format, 16)
            for page in PAGES:
                # A page of whole tiles is the code of BLOCK_SIZE with another constant.
                if page % choose_tile(rows, DIMS[0], kv_format, arch, block_size=page).tokens:
                    yield _decode_spec(arch, rows, kv_format, page=page)
        if not _served_by_fewer(arch, rows, kv_format, aligned=False):
            least, *others = ALIGNMENTS[kv_format]
            yield from _modes(arch, rows, kv_format, least)
            for align in others:
                yield _decode_spec(arch, rows, kv_format, align=align)


def _modes(arch: Arch, rows: int, kv_format: str, align: int) -> Iterator[KernelSpec]:
    for dims in DIMS:
        yield _decode_spec(arch, rows, kv_format, dims, align=align)
    yield _decode_spec(arch, rows, kv_format, causal=True, align=align)
    yield _decode_spec(arch, rows, kv_format, chunked=True, align=align)
    yield _decode_spec(arch, rows, kv_format, dtype=torch.float16, align=align)
    for rescale in ("amla", "flash"):
        if rescale != "amla" or not _amla_spills(arch, rows, kv_format, align):
            yield _decode_spec(arch, rows, kv_format, rescale=rescale, align=align)


def _amla_spills(arch: Arch, rows: int, kv_format: str, align: int) -> bool:
    """Whether the integer add makes the loop spill with any tile.

    64 rows of a quantised cache with wgmma do, 6 to 8 registers, with fewer stages too. Half the
    tokens mend fp8 alone, at twice as many steps. On AMD 32 rows of single bytes spill 3 registers.
    """
    if align == 16:
        tile = choose_tile(rows, DIMS[0], kv_format, arch, "amla")
        return kv_format != "float" and tile.wgmma and tile.rows == 64
    return arch.tensor_core == "mfma" and kv_format == "fp8" and rows > 16


def _served_by_fewer(arch: Arch, rows: int, kv_format: str, aligned: bool = True) -> bool:
    """Whether fewer rows have the same tile, which then need not be compiled again."""

    def tile(rows: int) -> Tile:
        return choose_tile(rows, DIMS[0], kv_format, arch, aligned=aligned)

    return any(tile(m) == tile(rows) for m in ROWS if m < rows)


def aligned_arguments(names: tuple[str, ...], align: int) -> tuple[str, ...]:
    """Those of the names that 16 divides where rows start at multiples of `align` bytes."""
    return names if align == 16 else tuple(name for name in names if name not in CACHE_PLACES)


def row_stride(dims: MlaDims, kv_format: str, align: int) -> int:
    """The least of a cache, in elements, whose rows start at multiples of `align` bytes, and below
    16 of no larger power of two."""
    size = 2 if kv_format == "float" else 1
    row = Fp8DsMlaLayout(dims).row_bytes if kv_format == "fp8_ds_mla" else dims.head_dim * size
    steps = -(-row // align)
    return (steps if align == 16 else steps | 1) * align // size


def _decode_spec(
    arch: Arch,
    rows: int,
    kv_format: str,
    dims: MlaDims = DIMS[0],
    *,
    causal: bool = False,
    chunked: bool = False,
    rescale: str = "pow2",
    dtype: torch.dtype = torch.bfloat16,
    page: int = BLOCK_SIZE,
    align: int = 16,
) -> KernelSpec:
    tile = choose_tile(rows, dims, kv_format, arch, rescale, page, align == 16)
    element = "bf16" if dtype == torch.bfloat16 else "fp16"
    cache = element if kv_format == "float" else CACHE_POINTER[kv_format]
    views = ("fp32", "bf16") if kv_format == "fp8_ds_mla" else (cache, cache)
    pointers = {
        "q_ptr": f"*{element}",
        "kv_ptr": f"*{cache}",
        "kv_scale_view_ptr": f"*{views[0]}",
        "kv_rope_view_ptr": f"*{views[1]}",
        "table_ptr": "*i32",
        "lens_ptr": "*i32",
        "parts_ptr": "*i32",
        "requests_ptr": "*i32",
        "out_ptr": f"*{element}",
        "lse_ptr": "*fp32",
        "part_acc_ptr": "*fp32",
        "part_sum_ptr": "*fp32",
        "outgrown_ptr": "*i32",
    }
    mode = "_".join([rescale, *["causal"] * causal, *["chunked"] * chunked])
    if page != BLOCK_SIZE:
        mode += f"_page{page}"
    if align < 16:
        mode += f"_align{align}"
    return KernelSpec(
        name=f"decode/{kv_format}/{element}/{dims.kv_lora_rank}+{dims.rope_dim}/m{rows}/{mode}",
        fn=mla_decode_kernel,
        signature={
            **pointers,
            "kv_scale": "*fp32" if kv_format == "fp8" else "fp32",
            "scale_log2": "fp32",
            **dict.fromkeys((*STRIDES, *SCALARS), "i32"),
        },
        constexprs={
            **kernel_constants(dims, kv_format, page, row_stride(dims, kv_format, align), align),
            **tile_constants(
                tile, arch, rescale, kv_format, dtype, prefetch=page % tile.tokens == 0
            ),
            "LOAD_SCALE": kv_format == "fp8",
            "CAUSAL": causal,
            "CHUNKED": chunked,
        },
        aligned=aligned_arguments((*pointers, *STRIDES), align),
        options=tile_options(tile),
        tensor_core="native" if tile.wgmma else "any",
        quick=cache == "bf16" and mode == "pow2" and dims == DIMS[0],
    )
