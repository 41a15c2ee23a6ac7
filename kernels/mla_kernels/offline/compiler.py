# SPDX-License-Identifier: Apache-2.0
"""Compile one specification with the ptxas in Triton's wheel and read off what it became."""

import re
import subprocess
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability
from triton.compiler.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction
from triton.runtime.jit import JITFunction

from mla_kernels.arch import Arch
from mla_kernels.offline import sass
from mla_kernels.offline.spec import KernelSpec

# setmaxnreg ignored, wgmma serialised, and their kin.
PTXAS_WARNINGS = re.compile(r"\(C75(0[7-9]|1[0-4])\)")


@dataclass(frozen=True)
class CompileReport:
    """What a specification compiles to on one arch. With `error` set, the numbers are zero.

    registers       per thread at kernel entry; warp_registers: what setmaxnreg asks for later
    spill_*_bytes   of the whole kernel, from ptxas; hot_local_*: LDL / STL instructions in the
                    loops that hold tensor-core instructions (the whole kernel if none does)
    shared_memory   bytes a CTA
    tensor_core     instructions by family: mma, wgmma, tcgen05
    warnings        ptxas lines about ignored register limits and serialised tensor-core code
    seconds         compile time; near zero if Triton's cache had it
    """

    spec: KernelSpec
    arch: Arch
    error: str | None = None
    registers: int = 0
    warp_registers: tuple[int, ...] = ()
    spill_store_bytes: int = 0
    spill_load_bytes: int = 0
    hot_local_loads: int = 0
    hot_local_stores: int = 0
    shared_memory: int = 0
    num_warps: int = 0
    tensor_core: Mapping[str, int] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    seconds: float = 0.0


def compile_spec(spec: KernelSpec, arch: Arch, dump: Path | None = None) -> CompileReport:
    """Compile `spec` for `arch`; with `dump`, also write ttgir, ptx and sass into that folder.

    A kernel that does not compile gives a report with `error`. RuntimeError if the kernel was
    imported for Triton's interpreter: it cannot be compiled in this process.
    """
    if not isinstance(spec.fn, JITFunction):
        raise RuntimeError("Expected compiled kernels: unset TRITON_INTERPRET for offline checks")
    target = sm_arch_from_capability(arch.sm)
    if target not in supported_targets(arch.sm):
        return CompileReport(
            spec, arch, error=f"{get_ptxas(arch.sm).path} cannot assemble {target}"
        )
    attrs = {(spec.fn.arg_names.index(n),): [["tt.divisibility", 16]] for n in spec.aligned}
    signature = {n: spec.signature.get(n, "constexpr") for n in spec.fn.arg_names}
    source_class = GluonASTSource if isinstance(spec.fn, GluonJITFunction) else ASTSource
    source = source_class(spec.fn, signature, dict(spec.constexprs), attrs)
    start = time.monotonic()
    try:
        kernel = triton.compile(
            source, target=GPUTarget("cuda", arch.sm, 32), options=dict(spec.options)
        )
    except Exception as error:  # any stage of the compiler may fail, each with its own type
        return CompileReport(spec, arch, error=_last_words(error))
    seconds = time.monotonic() - start
    ptx, log = kernel.asm["ptx"], _ptxas_log(kernel.asm["ptx"], arch.sm, kernel.metadata)
    listing = _disassemble(kernel.asm["cubin"])
    instructions = sass.parse(listing)
    if dump:
        texts = {"ttgir": kernel.asm["ttgir"], "ptx": ptx, "sass": listing}
        for suffix, text in texts.items():
            (dump / f"{spec.name.replace('/', '_')}_{arch.name}.{suffix}").write_text(text)
    hot_loads, hot_stores = sass.hot_spills(instructions)
    return CompileReport(
        spec,
        arch,
        registers=_number(r"Used (\d+) registers", log),
        warp_registers=tuple(
            sorted({int(n) for n in re.findall(r"setmaxnreg\.\S+\s+(\d+)", ptx)}),
        ),
        spill_store_bytes=_number(r"(\d+) bytes spill stores", log),
        spill_load_bytes=_number(r"(\d+) bytes spill loads", log),
        hot_local_loads=hot_loads,
        hot_local_stores=hot_stores,
        shared_memory=kernel.metadata.shared,
        num_warps=kernel.metadata.num_warps,
        tensor_core=sass.tensor_core_families(instructions),
        warnings=tuple(
            line for line in log.splitlines() if re.search(r"\(C75(0[7-9]|1[0-4])\)", line)
        ),
        seconds=seconds,
    )


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


def _last_words(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' | '.join(lines[-3:])}"[:400]
