# SPDX-License-Identifier: Apache-2.0
"""Which implementation each op of mla_kernels would use here, and why."""

import sys

from mla_backend.doctor.facts import Facts
from mla_backend.doctor.report import Result

# The op that MLA_BACKEND_IMPL speaks of.
_DECODE = "mla_decode"


def results(facts: Facts) -> list[Result]:
    """One result for every public op that has several implementations."""
    try:
        import mla_kernels
    except Exception as error:
        mend = "mend the import it names"
        return [Result("mla_kernels", "fail", f"{type(error).__name__}: {error}", mend)]
    shown = []
    for op in mla_kernels.__all__:
        module = sys.modules[getattr(mla_kernels, op).__module__]
        available = getattr(module, "AVAILABLE", None)
        if available is not None:
            asked = (op == _DECODE and facts.environ.get("MLA_BACKEND_IMPL")) or "auto"
            shown.append(choice(op, asked, available, "cuda" if facts.gpus else "cpu"))
    return shown


def choice(op: str, asked: str, available: tuple[str, ...], device: str) -> Result:
    """What `asked` comes to for `op` on `device`; a fall-back on a GPU is worth a warning."""
    import torch
    from mla_kernels.dispatch import choose_impl

    try:
        chosen = choose_impl(op, asked, torch.device(device), available=available)
    except ValueError as error:
        return Result(op, "fail", str(error), "unset MLA_BACKEND_IMPL")
    found = f"{chosen.impl}: {chosen.reason}"
    if device != "cpu" and asked == "auto" and chosen.impl == "torch":
        return Result(op, "warn", found, "this works but is slow; mend what the reason names")
    return Result(op, "ok", found)
