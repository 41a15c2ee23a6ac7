# SPDX-License-Identifier: Apache-2.0
"""Compiling for an AMD GPU (MI300) with Triton's LLVM, and reading off what came out."""

import re
from collections.abc import Mapping
from typing import Any

import triton
from triton.backends.amd.compiler import HIPOptions
from triton.backends.compiler import GPUTarget

from mla_kernels.arch import Arch
from mla_kernels.triton_common.launch import NVIDIA_OPTIONS

TARGET = GPUTarget("hip", "gfx942", 64)


def build(source: Any, options: Mapping[str, Any], arch: Arch) -> Any:
    """Triton's compiled kernel, with the options that `launch` leaves."""
    kept = {name: value for name, value in options.items() if name not in NVIDIA_OPTIONS}
    unknown = sorted(set(kept) - set(HIPOptions.__dataclass_fields__))
    if unknown:
        raise ValueError(f"Expected options that HIP knows, got {unknown}")
    return triton.compile(source, target=TARGET, options=kept)


def read(kernel: Any, arch: Arch) -> tuple[dict[str, Any], dict[str, str]]:
    """Fields of a CompileReport, and the texts to keep by suffix. All spills count as hot ones."""
    code = kernel.asm["amdgcn"]
    loads, stores = (len(re.findall(rf"^\s*scratch_{x}_", code, re.M)) for x in ("load", "store"))
    fields = {
        "registers": int(re.search(r"\.vgpr_count:\s*(\d+)", code)[1]),  # type: ignore[index]
        "hot_local_loads": loads,
        "hot_local_stores": stores,
        "tensor_core": {"mfma": len(re.findall(r"^\s*v_mfma_", code, re.M))},
    }
    return fields, {"amdgcn": code}
