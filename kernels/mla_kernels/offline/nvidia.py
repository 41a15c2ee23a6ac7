# SPDX-License-Identifier: Apache-2.0
"""Compiling for an NVIDIA GPU with the ptxas in Triton's wheel, and reading off what came out."""

import re
import subprocess
import tempfile
from collections.abc import Mapping
from functools import cache
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability

from mla_kernels.arch import Arch
from mla_kernels.offline import sass, ttgir

# setmaxnreg ignored, wgmma serialised, and their kin.
PTXAS_WARNINGS = re.compile(r"\(C75(0[7-9]|1[0-4])\)")


def build(source: Any, options: Mapping[str, Any], arch: Arch) -> Any:
    """Triton's compiled kernel."""
    target = sm_arch_from_capability(arch.sm)
    if target not in supported_targets(arch.sm):
        raise ValueError(f"{get_ptxas(arch.sm).path} cannot assemble {target}")
    return triton.compile(source, target=GPUTarget("cuda", arch.sm, 32), options=dict(options))


def read(kernel: Any, arch: Arch) -> tuple[dict[str, Any], dict[str, str]]:
    """Fields of a CompileReport, and the texts to keep by suffix."""
    ptx, log = kernel.asm["ptx"], _ptxas_log(kernel.asm["ptx"], arch.sm, kernel.metadata)
    listing = _disassemble(kernel.asm["cubin"])
    instructions = sass.parse(listing)
    hot_loads, hot_stores = sass.hot_spills(instructions)
    fields = {
        "registers": _number(r"Used (\d+) registers", log),
        "warp_registers": tuple(
            sorted({int(n) for n in re.findall(r"setmaxnreg\.\S+\s+(\d+)", ptx)})
        ),
        "spill_store_bytes": _number(r"(\d+) bytes spill stores", log),
        "spill_load_bytes": _number(r"(\d+) bytes spill loads", log),
        "hot_local_loads": hot_loads,
        "hot_local_stores": hot_stores,
        "unused_barriers": ttgir.unused_barriers(kernel.asm["ttgir"]),
        "tensor_core": sass.tensor_core_families(instructions),
        "warnings": tuple(line for line in log.splitlines() if PTXAS_WARNINGS.search(line)),
    }
    return fields, {"ptx": ptx, "sass": listing}


@cache
def supported_targets(sm: int) -> frozenset[str]:
    """Targets that the ptxas Triton uses for compute capability `sm` can assemble."""
    usage = subprocess.run([get_ptxas(sm).path, "--help"], capture_output=True, text=True)
    return frozenset(re.findall(r"sm_\d+[af]?", usage.stdout))


def _ptxas_log(ptx: str, sm: int, metadata: Any) -> str:
    """Triton drops the log of a successful assembly, so assemble once more."""
    extra = metadata.ptx_options.split() if metadata.ptx_options else []
    fusion = [] if metadata.enable_fp_fusion else ["--fmad=false"]
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [get_ptxas(sm).path, "-v", "-lineinfo", *fusion, *extra]
        command += [f"--gpu-name={sm_arch_from_capability(sm)}", file.name, "-o", "/dev/null"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stderr + done.stdout


def _disassemble(cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-sass", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _number(pattern: str, text: str) -> int:
    match = re.search(pattern, text)
    return int(match.group(1)) if match else 0
