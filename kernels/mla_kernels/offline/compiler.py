# SPDX-License-Identifier: Apache-2.0
"""Compile one specification and read off what it became."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from triton.compiler.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction
from triton.runtime.jit import JITFunction

from mla_kernels.arch import AMD, Arch
from mla_kernels.offline import amd, nvidia
from mla_kernels.offline.spec import KernelSpec
from mla_kernels.triton_common.launch import COMMON_OPTIONS


@dataclass(frozen=True)
class CompileReport:
    """What a specification compiles to on one arch. With `error` set, the numbers are zero.

    registers       per thread at kernel entry; warp_registers: what setmaxnreg asks for later
    spill_*_bytes   of the whole kernel, from ptxas; hot_local_*: LDL / STL instructions in the
                    loops that hold tensor-core instructions (the whole kernel if none does, or
                    on AMD)
    unused_barriers mbarriers that are made and not used (ttgir.unused_barriers)
    shared_memory   bytes a CTA
    tensor_core     instructions by family: mma, wgmma, tcgen05, mfma
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
    unused_barriers: tuple[str, ...] = ()
    shared_memory: int = 0
    num_warps: int = 0
    tensor_core: Mapping[str, int] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    seconds: float = 0.0


def compile_spec(spec: KernelSpec, arch: Arch, dump: Path | None = None) -> CompileReport:
    """Compile `spec` for `arch`; with `dump`, also write ttgir and assembly into that folder.

    A kernel that does not compile gives a report with `error`. RuntimeError if the kernel was
    imported for Triton's interpreter: it cannot be compiled in this process.
    """
    if not isinstance(spec.fn, JITFunction):
        raise RuntimeError("Expected compiled kernels: unset TRITON_INTERPRET for offline checks")
    attrs = {(spec.fn.arg_names.index(n),): [["tt.divisibility", 16]] for n in spec.aligned}
    signature = {n: spec.signature.get(n, "constexpr") for n in spec.fn.arg_names}
    source_class = GluonASTSource if isinstance(spec.fn, GluonJITFunction) else ASTSource
    source = source_class(spec.fn, signature, dict(spec.constexprs), attrs)
    vendor = amd if arch == AMD else nvidia
    start = time.monotonic()
    try:
        kernel = vendor.build(source, {**COMMON_OPTIONS, **spec.options}, arch)
    except Exception as error:  # any stage of the compiler may fail, each with its own type
        return CompileReport(spec, arch, error=_last_words(error))
    seconds = time.monotonic() - start
    fields, texts = vendor.read(kernel, arch)
    if dump:
        for suffix, text in (texts | {"ttgir": kernel.asm["ttgir"]}).items():
            (dump / f"{spec.name.replace('/', '_')}_{arch.name}.{suffix}").write_text(text)
    return CompileReport(
        spec,
        arch,
        shared_memory=kernel.metadata.shared,
        num_warps=kernel.metadata.num_warps,
        seconds=seconds,
        **fields,
    )


def _last_words(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' | '.join(lines[-3:])}"[:400]
