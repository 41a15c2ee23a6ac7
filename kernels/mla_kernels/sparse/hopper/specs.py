# SPDX-License-Identifier: Apache-2.0
"""The specialisations of the Hopper sparse kernel, for the offline compiler."""

from mla_kernels.arch import Arch
from mla_kernels.decode.hopper.bf16.specs import descriptors
from mla_kernels.layouts import BLOCK_SIZE, Fp8DsMlaLayout, MlaDims
from mla_kernels.offline.spec import KernelSpec
from mla_kernels.sparse.hopper.kernel import NOT_SPECIALIZED, hopper_sparse_kernel
from mla_kernels.sparse.hopper.launcher import CONFIGS

POINTERS = {
    "slots": "*i32",
    "lengths": "*i32",
    "sink": "*fp32",
    "out": "*bf16",
    "lse": "*fp32",
    "max_logits": "*fp32",
    "part_acc": "*fp32",
    "part_sums": "*fp32",
}
CACHE = {
    "bf16": ("*bf16", "*bf16", "*bf16"),
    "fp8_ds_mla": ("*u8", "*fp32", "*bf16"),
}
ROW = {"bf16": MlaDims().head_dim, "fp8_ds_mla": Fp8DsMlaLayout().row_bytes}
SCALARS = ("page_stride", *NOT_SPECIALIZED)
# Tokens in one range, in several, and in shares of all tokens; with lengths and without where the
# stream (stream.py) has other code in its loop for them.
MODES: dict[str, dict[str, tuple[bool, ...]]] = {
    "bf16": {"": (False, True), "_split": (True,), "_shares": (False, True)},
    "fp8_ds_mla": {"": (False,), "_split": (True,), "_shares": (True,)},
}


def specialisations(arch: Arch) -> list[KernelSpec]:
    if arch.sm != 90:
        return []
    return [
        KernelSpec(
            name=f"sparse/hopper/{kv_format}{mode}"
            f"{'_lengths' if lengths and mode in ('', '_shares') and kv_format == 'bf16' else ''}"
            f"{'_max_logits' if max_logits else ''}",
            fn=hopper_sparse_kernel,
            signature={
                **{n: t for n, t in descriptors().items() if n.startswith("q_")},
                **dict(zip(("kv", "kv_scale", "kv_rope"), CACHE[kv_format], strict=True)),
                **POINTERS,
                "scale_log2": "fp32",
                **dict.fromkeys(SCALARS, "i32"),
            },
            constexprs={
                **CONFIGS[kv_format],
                "FORMAT": kv_format,
                "PAGE": BLOCK_SIZE,
                "ROW": ROW[kv_format],
                "HAS_LENGTHS": lengths,
                "HAS_SINK": not mode,
                "SPLIT": mode != "",
                "SHARES": mode == "_shares",
                "MAX_LOGITS": max_logits,
            },
            aligned=("kv", "kv_scale", "kv_rope", *POINTERS, "page_stride"),
            options={"num_warps": 4},
            tensor_core="native",
            quick=not mode and not lengths and not max_logits,
        )
        for kv_format, modes in MODES.items()
        for mode, with_lengths in modes.items()
        for lengths in with_lengths
        for max_logits in (False, True)
    ]
