# SPDX-License-Identifier: Apache-2.0
"""The specialisations of the few-rows kernel with a warp that loads, compiled offline."""

from mla_kernels.arch import Arch
from mla_kernels.decode.hopper.bf16.specs import POINTERS, SCALARS
from mla_kernels.decode.hopper.fp8.operands import rows_of
from mla_kernels.decode.triton.few_rows.specs import STRIDES
from mla_kernels.decode.triton.few_rows_fp8.kernel import few_rows_fp8_kernel
from mla_kernels.decode.triton.few_rows_fp8.launcher import CONFIGS, OPTIONS
from mla_kernels.offline.spec import KernelSpec


def specialisations(arch: Arch) -> list[KernelSpec]:
    if arch.sm != 90:
        return []
    signature = {
        "q_ptr": "*bf16",
        "kv_desc": f"tensordesc<bf16[64, 256],{rows_of(256)!r}>",
        "kv_rope_desc": f"tensordesc<bf16[64, 32],{rows_of(32)!r}>",
        "kv_scale": "*fp32",
        **POINTERS,
        "scale_log2": "fp32",
        **dict.fromkeys((*STRIDES, *SCALARS), "i32"),
    }
    return [
        KernelSpec(
            name=f"decode_few_rows_tma/fp8/m{rows}/pow2{'_causal' if causal else ''}"
            f"{'_chunked' if chunked else ''}",
            fn=few_rows_fp8_kernel,
            signature=signature,
            constexprs={**CONFIGS[rows], "LOAD_SCALE": True, "CAUSAL": causal, "CHUNKED": chunked},
            aligned=("q_ptr", *POINTERS, *STRIDES),
            options=OPTIONS[rows],
            tensor_core="any",
            quick=not causal and not chunked,
        )
        for rows in CONFIGS
        for causal in (False, True)
        for chunked in (False, True)
    ]
