# SPDX-License-Identifier: Apache-2.0
"""Compile the Triton and Gluon kernels for any GPU without having one, and check what came out.

Each kernel package lists what it ships in a module `specs.py` with one function,
`specialisations(arch: Arch) -> list[KernelSpec]`. From the shell:

    python -m mla_kernels.offline --arch 90 --match decode
"""

from mla_kernels.offline.check import check
from mla_kernels.offline.compiler import CompileReport, compile_spec
from mla_kernels.offline.spec import KernelSpec, all_specs

__all__ = ["CompileReport", "KernelSpec", "all_specs", "check", "compile_spec"]
