# SPDX-License-Identifier: Apache-2.0
"""The specialisations of the bf16 Hopper kernel, for the offline compiler."""

from mla_kernels.arch import Arch
from mla_kernels.decode.hopper import layouts
from mla_kernels.decode.hopper.bf16.kernel import hopper_decode_kernel
from mla_kernels.decode.hopper.bf16.launcher import CONFIG
from mla_kernels.decode.hopper.support import RESCALES
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
SCALARS = ("table_stride", "num_rows", "num_heads", "s_q")
# If FULL, what TMA writes.
RESULTS = {
    "out": f"tensordesc<bf16[64, 256],{layouts.TILE.value!r}>",
    "part_acc": f"tensordesc<fp32[64, 128],{layouts.PARTIAL.value!r}>",
}


def specialisations(arch: Arch) -> list[KernelSpec]:
    if arch.sm != 90:
        return []
    scalars = {"scale_log2": "fp32"} | dict.fromkeys(SCALARS, "i32")
    return [
        KernelSpec(
            name=f"decode/hopper/bf16_{rescale}{'_causal' if causal else ''}"
            f"{'_chunked' if chunked else ''}{'_full' if full else ''}"
            f"{'_peeled' if peeled else ''}",
            fn=hopper_decode_kernel,
            signature=descriptors() | POINTERS | (RESULTS if full else {}) | scalars,
            constexprs={
                **CONFIG,
                "RESCALE": rescale,
                "CAUSAL": causal,
                "CHUNKED": chunked,
                "FULL": full,
                "PEELED": peeled,
            },
            aligned=tuple(name for name in POINTERS if not (full and name in RESULTS)),
            options={"num_warps": 4},
            tensor_core="native",
            quick=rescale == "pow2" and not causal and not chunked,
        )
        for rescale in RESCALES
        for causal in (False, True)
        for chunked in (False, True)
        for full in (False, True)
        if not (full and causal and chunked)
        for peeled in (False, True)
    ]


def descriptors() -> dict[str, str]:
    """Types of the TMA descriptors of launcher.py."""
    types = {
        "kv_desc": f"tensordesc<bf16[64, 256],{layouts.TILE.value!r}>",
        "kv_rope_desc": f"tensordesc<bf16[64, 64],{layouts.TILE.value!r}>",
    }
    for name, width in (("q_desc", 256), ("q_rope_desc", 64)):
        types[name] = f"tensordesc<bf16[1, 64, {width}],{layouts.QUERY_TILE.value!r}>"
    return types
