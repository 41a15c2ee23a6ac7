# SPDX-License-Identifier: Apache-2.0
"""The specialisations of the rotate-and-append kernel that are compiled offline."""

from mla_kernels.arch import Arch
from mla_kernels.cache.triton.launcher import row_constants
from mla_kernels.layer.config import MlaLayerConfig
from mla_kernels.layer.triton.kernel import rotate_and_append_kernel
from mla_kernels.layer.triton.launcher import HEADS, NUM_WARPS
from mla_kernels.layouts import BLOCK_SIZE
from mla_kernels.offline.spec import KernelSpec


def specialisations(arch: Arch) -> list[KernelSpec]:
    formats = (("float", "bf16"), ("fp8", "u8"), ("fp8_ds_mla", "u8"))
    return [_spec(arch, kv_format, cache) for kv_format, cache in formats]


def _spec(arch: Arch, kv_format: str, cache: str) -> KernelSpec:
    c = MlaLayerConfig()
    return KernelSpec(
        name=f"rotate_and_append/{kv_format}/bf16/{c.kv_lora_rank}+{c.rope_dim}",
        fn=rotate_and_append_kernel,
        signature={
            "q_up_ptr": "*bf16",
            "q_ptr": "*bf16",
            "down_ptr": "*bf16",
            "table_ptr": "*fp32",
            "cache_ptr": f"*{cache}",
            "block_table_ptr": "*i32",
            "lens_ptr": "*i32",
            "kv_scale": "*fp32" if kv_format == "fp8" else "fp32",
            "num_heads": "i32",
            "page_stride": "i32",
            "row_stride": "i32",
            "block_table_stride": "i32",
        },
        constexprs={
            "HEADS": HEADS,
            "NOPE": c.nope_dim,
            "Q_LORA": c.q_lora_rank,
            "PAGE": BLOCK_SIZE,
            **row_constants(c.cache, kv_format),
            "LOAD_SCALE": kv_format == "fp8",
            "HW_FP8": arch.e4m3_convert,
        },
        aligned=(
            "q_up_ptr",
            "q_ptr",
            "down_ptr",
            "table_ptr",
            "cache_ptr",
            "block_table_ptr",
            "num_heads",
            "page_stride",
            "row_stride",
        ),
        options={"num_warps": NUM_WARPS},
        quick=kv_format == "fp8_ds_mla",
    )
