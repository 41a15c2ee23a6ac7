# SPDX-License-Identifier: Apache-2.0
"""The specialisations of the fp8-query Hopper kernel, for the offline compiler."""

from mla_kernels.arch import Arch
from mla_kernels.decode.hopper.bf16.specs import POINTERS, SCALARS
from mla_kernels.decode.hopper.fp8_query import operands
from mla_kernels.decode.hopper.fp8_query.kernel import hopper_fp8_query_kernel
from mla_kernels.decode.hopper.fp8_query.launcher import CONFIG
from mla_kernels.offline.spec import KernelSpec

DESCRIPTORS = {
    "q_desc": f"tensordesc<bf16[1, 64, 256],{operands.QUERY_LATENT.value!r}>",
    "q_rope_desc": f"tensordesc<bf16[1, 64, 32],{operands.QUERY_ROPE.value!r}>",
    "kv_desc": f"tensordesc<bf16[64, 128],{operands.LATENT_UNITS.value!r}>",
    "rope_desc": f"tensordesc<bf16[64, 32],{operands.ROPE_UNITS.value!r}>",
}


def specialisations(arch: Arch) -> list[KernelSpec]:
    if arch.sm != 90:
        return []
    return [
        KernelSpec(
            name=f"decode/hopper/fp8_query{'_scales' if scales else ''}"
            f"{'_causal' if causal else ''}{'_chunked' if chunked else ''}",
            fn=hopper_fp8_query_kernel,
            signature=POINTERS
            | DESCRIPTORS
            | {"scale_log2": "fp32"}
            | dict.fromkeys(("q_scale", "kv_scale"), "*fp32" if scales else "fp32")
            | dict.fromkeys(SCALARS, "i32"),
            constexprs={
                **CONFIG,
                "LOAD_Q_SCALE": scales,
                "LOAD_SCALE": scales,
                "CAUSAL": causal,
                "CHUNKED": chunked,
            },
            aligned=tuple(POINTERS),
            options={"num_warps": 4},
            tensor_core="native",
            quick=scales and not causal and not chunked,
        )
        for scales in (False, True)
        for causal in (False, True)
        for chunked in (False, True)
    ]
