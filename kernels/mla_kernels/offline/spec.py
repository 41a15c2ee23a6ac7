# SPDX-License-Identifier: Apache-2.0
"""What to compile: one `KernelSpec` per shipped specialisation, collected from every `specs.py`."""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import mla_kernels
from mla_kernels.arch import Arch


@dataclass(frozen=True)
class KernelSpec:
    """One kernel with everything the compiler would learn from a launch.

    name         unique per arch, "<op>/<variant>"
    fn           the `@triton.jit` or `@gluon.jit` function
    signature    run-time arguments: name -> "*bf16", "i32", "fp32", "tensordesc<bf16[64, 512]>"
    constexprs   compile-time arguments; also those a launch folds in (an int equal to 1, None)
    aligned      pointers and ints that are multiples of 16 at every launch
    options      num_warps, num_stages, launch_pdl, maxnreg ...
    tensor_core  "any": must contain tensor-core instructions; "native": of the newest family of
                 the arch (wgmma on sm_90, tcgen05 on sm_100); None: need not
    quick        belongs to the subset that `make test` compiles
    """

    name: str
    fn: Any
    signature: Mapping[str, str]
    constexprs: Mapping[str, Any] = field(default_factory=dict)
    aligned: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    tensor_core: Literal["any", "native"] | None = None
    quick: bool = False


def spec_modules() -> list[str]:
    """Dotted names of all `specs.py` modules of mla_kernels."""
    root = Path(mla_kernels.__file__).parent
    found = sorted(root.rglob("specs.py"))
    return [".".join(("mla_kernels", *p.relative_to(root).with_suffix("").parts)) for p in found]


def all_specs(arch: Arch) -> list[KernelSpec]:
    """Every specialisation shipped for `arch`. ValueError if two share a name."""
    specs = [s for m in spec_modules() for s in importlib.import_module(m).specialisations(arch)]
    names = [s.name for s in specs]
    twice = sorted({n for n in names if names.count(n) > 1})
    if twice:
        raise ValueError(f"Expected unique kernel specification names, got twice: {twice}")
    return specs
