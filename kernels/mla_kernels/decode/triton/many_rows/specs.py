# SPDX-License-Identifier: Apache-2.0
"""The specialisations of the many-rows kernel that are compiled offline."""

from mla_kernels.arch import Arch
from mla_kernels.decode.hopper.bf16.specs import POINTERS, SCALARS, descriptors
from mla_kernels.decode.triton.many_rows.kernel import many_rows_kernel
from mla_kernels.decode.triton.many_rows.launcher import LOADER_REGS
from mla_kernels.offline.spec import KernelSpec


def specialisations(arch: Arch) -> list[KernelSpec]:
    if arch.sm != 90:
        return []
    scalars = {"scale_log2": "fp32"} | dict.fromkeys(SCALARS, "i32")
    return [
        KernelSpec(
            name=f"decode_many_rows/{dtype}/pow2{'_causal' if causal else ''}"
            f"{'_chunked' if chunked else ''}",
            fn=many_rows_kernel,
            signature={
                name: x.replace("bf16", dtype)
                for name, x in (descriptors() | POINTERS | scalars).items()
            },
            constexprs={"CAUSAL": causal, "CHUNKED": chunked, "LOADER_REGS": LOADER_REGS},
            aligned=tuple(POINTERS),
            options={"num_warps": 8},
            tensor_core="native",
            quick=dtype == "bf16" and not causal and not chunked,
        )
        for dtype in ("bf16", "fp16")
        for causal in (False, True)
        for chunked in (False, True)
    ]
