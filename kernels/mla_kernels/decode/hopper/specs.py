# SPDX-License-Identifier: Apache-2.0
"""The specialisations of the Hopper kernel, for the offline compiler."""

from mla_kernels.arch import Arch
from mla_kernels.decode.hopper import layouts
from mla_kernels.decode.hopper.kernel import hopper_decode_kernel
from mla_kernels.decode.hopper.launcher import CONFIG
from mla_kernels.offline.spec import KernelSpec

POINTERS = {
    "table": "*i32",
    "seq_lens": "*i32",
    "parts": "*i32",
    "requests": "*i32",
    "out": "*bf16",
    "lse": "*fp32",
    "part_acc": "*fp32",
    "part_sums": "*fp32",
}


def specialisations(arch: Arch) -> list[KernelSpec]:
    if arch.sm != 90:
        return []
    half = f"tensordesc<bf16[64, 256],{layouts.TILE.value!r}>"
    rope = f"tensordesc<bf16[64, 64],{layouts.TILE.value!r}>"
    scalars = {"scale_log2": "fp32"} | dict.fromkeys(
        ("table_stride", "num_rows", "num_heads", "s_q"), "i32"
    )
    descriptors = {"q_desc": half, "q_rope_desc": rope, "kv_desc": half, "kv_rope_desc": rope}
    return [
        KernelSpec(
            name=f"decode/hopper/{'causal' if causal else 'full'}{'_chunked' if chunked else ''}",
            fn=hopper_decode_kernel,
            signature=descriptors | POINTERS | scalars,
            constexprs={**CONFIG, "CAUSAL": causal, "CHUNKED": chunked},
            aligned=tuple(POINTERS),
            options={"num_warps": 4},
            tensor_core="native",
            quick=not causal and not chunked,
        )
        for causal in (False, True)
        for chunked in (False, True)
    ]
