# SPDX-License-Identifier: Apache-2.0
"""The specialisations of the query join that are compiled offline."""

from mla_kernels.arch import Arch
from mla_kernels.layouts import MlaDims
from mla_kernels.offline.spec import KernelSpec
from mla_kernels.query.triton.kernel import join_query_kernel
from mla_kernels.query.triton.launcher import NUM_WARPS, widths

STRIDES = ("latent_stride_t", "latent_stride_h", "rope_stride_t", "rope_stride_h")


def specialisations(arch: Arch) -> list[KernelSpec]:
    dims = MlaDims()
    pointers = {"latent_ptr": "*bf16", "rope_ptr": "*bf16", "out_ptr": "*bf16"}
    return [
        KernelSpec(
            name=f"join_query/bf16/{dims.kv_lora_rank}+{dims.rope_dim}",
            fn=join_query_kernel,
            signature={
                **pointers,
                **dict.fromkeys(("num_rows", "num_heads", *STRIDES), "i32"),
            },
            constexprs=widths(dims.kv_lora_rank, dims.rope_dim),
            aligned=(*pointers, "num_heads", *STRIDES),
            options={"num_warps": NUM_WARPS},
            quick=True,
        )
    ]
