# SPDX-License-Identifier: Apache-2.0
"""The specialisations of the fp8 Hopper kernel, for the offline compiler."""

from mla_kernels.arch import Arch
from mla_kernels.decode.hopper.bf16.specs import POINTERS, SCALARS
from mla_kernels.decode.hopper.fp8.configs import CONFIGS
from mla_kernels.decode.hopper.fp8.kernel import hopper_fp8_kernel
from mla_kernels.decode.hopper.fp8.operands import rows_of
from mla_kernels.decode.hopper.fp8.query import query_box
from mla_kernels.decode.hopper.layouts import QUERY_TILE, SCALES
from mla_kernels.offline.spec import KernelSpec


def specialisations(arch: Arch) -> list[KernelSpec]:
    if arch.sm != 90:
        return []
    return [
        KernelSpec(
            name=f"decode/hopper/fp8/{kv_format}_n{n}{'_causal' if causal else ''}"
            f"{'_chunked' if chunked else ''}",
            fn=hopper_fp8_kernel,
            signature=POINTERS
            | descriptors(kv_format, n)
            | {
                "scale_log2": "fp32",
                "kv_scale": "*fp32" if kv_format == "fp8" else "fp32",
            }
            | dict.fromkeys(SCALARS, "i32"),
            constexprs={
                **config,
                "LOAD_SCALE": kv_format == "fp8",
                "CAUSAL": causal,
                "CHUNKED": chunked,
            },
            aligned=tuple(POINTERS),
            options={"num_warps": 4},
            tensor_core="native",
            quick=not causal and not chunked,
        )
        for kv_format, configs in CONFIGS.items()
        for n, config in configs.items()
        for causal in (False, True)
        for chunked in (False, True)
    ]


def descriptors(kv_format: str, n: int) -> dict[str, str]:
    """Types of the TMA descriptors of launcher.py."""
    units = f"tensordesc<bf16[64, 128],{rows_of(128)!r}>"
    query, rope_query = (
        f"tensordesc<bf16[1, {n}, {width}],{QUERY_TILE.value!r}>" for width in (query_box(n), 64)
    )
    both = {"q_desc": query, "q_rope_desc": rope_query, "kv_desc": units}
    if kv_format == "fp8":
        rope = f"tensordesc<bf16[64, 32],{rows_of(32)!r}>"
        return both | {"rope_desc": rope, "scale_desc": units}
    return both | {
        "rope_desc": f"tensordesc<bf16[64, 64],{rows_of(64)!r}>",
        "scale_desc": f"tensordesc<fp32[64, 4],{SCALES.value!r}>",
    }
