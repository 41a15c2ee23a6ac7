# SPDX-License-Identifier: Apache-2.0
"""The specialisations of the few-rows kernel that are compiled offline."""

import torch

from mla_kernels.arch import Arch
from mla_kernels.decode.triton.few_rows.kernel import few_rows_kernel
from mla_kernels.decode.triton.few_rows.launcher import kernel_constants
from mla_kernels.decode.triton.few_rows.tiles import few_rows_tile
from mla_kernels.layouts import BLOCK_SIZE, Fp8DsMlaLayout, MlaDims
from mla_kernels.offline.spec import KernelSpec

ALL_DIMS = (MlaDims(512, 64), MlaDims(256, 32))
STRIDES = ("q_stride_b", "q_stride_s", "q_stride_h")
SCALARS = ("page_step", "table_stride", "num_rows", "num_heads", "s_q")


def specialisations(arch: Arch) -> list[KernelSpec]:
    made = [
        spec
        for rows in (16, 32)
        for kv_format in ("float", "fp8", "fp8_ds_mla")
        for spec in [
            *[_spec(arch, rows, kv_format, dims) for dims in ALL_DIMS],
            _spec(arch, rows, kv_format, causal=True),
            _spec(arch, rows, kv_format, chunked=True),
            _spec(arch, rows, kv_format, causal=True, chunked=True),
            _spec(arch, rows, kv_format, dtype=torch.float16),
            *[_spec(arch, rows, kv_format, page=page) for page in (32, 128)],
        ]
    ]
    return [spec for spec in made if spec is not None]


def _spec(
    arch: Arch,
    rows: int,
    kv_format: str,
    dims: MlaDims = ALL_DIMS[0],
    *,
    causal: bool = False,
    chunked: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    page: int = BLOCK_SIZE,
) -> KernelSpec | None:
    tile = few_rows_tile(rows, dims, kv_format, arch)
    if tile is None:
        return None
    element = "bf16" if dtype == torch.bfloat16 else "fp16"
    unit = "bf16" if kv_format == "fp8_ds_mla" else element
    row_bytes = {
        "float": 2 * dims.head_dim,
        "fp8": dims.head_dim,
        "fp8_ds_mla": Fp8DsMlaLayout(dims).row_bytes,
    }
    pointers = {
        "q_ptr": f"*{element}",
        "kv_ptr": f"*{unit}",
        "scale_ptr": "*fp32" if kv_format == "fp8_ds_mla" else f"*{unit}",
        "table_ptr": "*i32",
        "lens_ptr": "*i32",
        "parts_ptr": "*i32",
        "requests_ptr": "*i32",
        "out_ptr": f"*{element}",
        "lse_ptr": "*fp32",
        "part_acc_ptr": "*fp32",
        "part_sum_ptr": "*fp32",
    }
    mode = "_".join(["pow2", *["causal"] * causal, *["chunked"] * chunked])
    if page != BLOCK_SIZE:
        mode += f"_page{page}"
    size = f"{dims.kv_lora_rank}+{dims.rope_dim}"
    return KernelSpec(
        name=f"decode_few_rows/{kv_format}/{element}/{size}/m{rows}/{mode}",
        fn=few_rows_kernel,
        signature={
            **pointers,
            "kv_scale": "*fp32" if kv_format == "fp8" else "fp32",
            "scale_log2": "fp32",
            **dict.fromkeys((*STRIDES, *SCALARS), "i32"),
        },
        constexprs={
            **kernel_constants(tile, arch, dims, kv_format, page, row_bytes[kv_format] // 2),
            "LOAD_SCALE": kv_format == "fp8",
            "CAUSAL": causal,
            "CHUNKED": chunked,
        },
        aligned=(*pointers, *STRIDES),
        options={"num_warps": tile.warps, "maxnreg": tile.max_registers},
        tensor_core="any",
        quick=kv_format == "fp8" and mode == "pow2" and dims == ALL_DIMS[0] and element == "bf16",
    )
