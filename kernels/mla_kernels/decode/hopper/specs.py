# SPDX-License-Identifier: Apache-2.0
"""The specialisations of the Hopper kernel, for the offline compiler."""

from mla_kernels.arch import Arch
from mla_kernels.decode.hopper import layouts
from mla_kernels.decode.hopper.kernel import hopper_decode_kernel
from mla_kernels.decode.hopper.launcher import CONFIGS
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


# If FULL, what TMA writes.
RESULTS = {
    "out": f"tensordesc<bf16[64, 256],{layouts.TILE.value!r}>",
    "part_acc": f"tensordesc<fp32[64, 128],{layouts.PARTIAL.value!r}>",
}


def specialisations(arch: Arch) -> list[KernelSpec]:
    if arch.sm != 90:
        return []
    scalars = {"scale_log2": "fp32"} | dict.fromkeys(
        ("table_stride", "num_rows", "num_heads", "s_q"), "i32"
    )
    return [
        KernelSpec(
            name=f"decode/hopper/{kv_format}_{rescale}{'_causal' if causal else ''}"
            f"{'_chunked' if chunked else ''}{'_full' if full else ''}"
            f"{'_peeled' if peeled else ''}",
            fn=hopper_decode_kernel,
            signature=descriptors(kv_format)
            | POINTERS
            | (RESULTS if full else {})
            | scalars
            | {"kv_scale": "*fp32" if kv_format == "fp8" else "fp32"},
            constexprs={
                **CONFIGS[kv_format],
                "FORMAT": kv_format,
                "LOAD_SCALE": kv_format == "fp8",
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
        for kv_format in ("bf16", "fp8", "fp8_ds_mla")
        for causal in (False, True)
        for chunked in (False, True)
        for full in (False, True)
        if not full or (kv_format == "bf16" and not (causal and chunked))
        for peeled in (False, True)[: 2 if kv_format == "bf16" else 1]
    ]


def descriptors(kv_format: str) -> dict[str, str]:
    """Types of the TMA descriptors of launcher.py."""
    half = f"tensordesc<bf16[64, 256],{layouts.TILE.value!r}>"
    rope = f"tensordesc<bf16[64, 64],{layouts.TILE.value!r}>"
    code_half = f"tensordesc<u8[64, 256],{layouts.CODES.value!r}>"
    code_rope = f"tensordesc<u8[64, 64],{layouts.CODES.value!r}>"
    types = {"kv_desc": half, "kv_rope_desc": rope}
    for name, width in (("q_desc", 256), ("q_rope_desc", 64)):
        types[name] = f"tensordesc<bf16[1, 64, {width}],{layouts.QUERY_TILE.value!r}>"
    if kv_format == "fp8":
        types |= {"kv_desc": code_half, "kv_rope_desc": code_rope}
    if kv_format == "fp8_ds_mla":
        scales = f"tensordesc<fp32[64, 4],{layouts.SCALES.value!r}>"
        types |= {"kv_desc": code_half, "scale_desc": scales}
    return {"scale_desc": types["kv_desc"]} | types
