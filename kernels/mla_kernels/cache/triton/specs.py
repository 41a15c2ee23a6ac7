# SPDX-License-Identifier: Apache-2.0
"""The specialisations of the cache write kernel that are compiled offline."""

from mla_kernels.arch import Arch
from mla_kernels.cache.triton.kernel import write_kv_cache_kernel
from mla_kernels.cache.triton.launcher import NUM_WARPS, row_constants
from mla_kernels.layouts import BLOCK_SIZE, Fp8DsMlaLayout, MlaDims
from mla_kernels.offline.spec import KernelSpec

POINTERS = ("kv_c_ptr", "k_pe_ptr", "cache_ptr", "slots_ptr")
STRIDES = ("kv_c_stride", "k_pe_stride", "page_stride", "row_stride")


def specialisations(arch: Arch) -> list[KernelSpec]:
    return [
        _spec(arch, dims, kv_format, source, cache)
        for dims in (MlaDims(), MlaDims(256, 32))
        for kv_format, source, cache in (
            ("float", "bf16", "bf16"),
            ("float", "fp16", "fp16"),
            ("float", "fp32", "bf16"),
            ("fp8", "bf16", "u8"),
            ("fp8", "fp32", "u8"),
            ("fp8_ds_mla", "bf16", "u8"),
            ("fp8_ds_mla", "fp16", "u8"),
        )
    ]


def _spec(arch: Arch, dims: MlaDims, kv_format: str, source: str, cache: str) -> KernelSpec:
    kv_scale = "*fp32" if kv_format == "fp8" else "fp32"
    row = Fp8DsMlaLayout(dims).row_bytes if kv_format == "fp8_ds_mla" else dims.head_dim
    return KernelSpec(
        name=f"write_kv_cache/{kv_format}/{source}/{dims.kv_lora_rank}+{dims.rope_dim}",
        fn=write_kv_cache_kernel,
        signature={
            "kv_c_ptr": f"*{source}",
            "k_pe_ptr": f"*{source}",
            "cache_ptr": f"*{cache}",
            "slots_ptr": "*i64",
            "kv_scale": kv_scale,
            **dict.fromkeys(STRIDES, "i32"),
        },
        constexprs={
            "PAGE": BLOCK_SIZE,
            **row_constants(dims, kv_format),
            "LOAD_SCALE": kv_format == "fp8",
            "HW_FP8": arch.e4m3_convert,
        },
        aligned=(*POINTERS, *(STRIDES if row % 16 == 0 else STRIDES[:2])),
        options={"num_warps": NUM_WARPS},
        quick=dims == MlaDims() and source == "bf16",
    )
