# SPDX-License-Identifier: Apache-2.0
"""What must hold for every shipped specialisation."""

from mla_kernels.arch import KB
from mla_kernels.offline.compiler import CompileReport


def check(report: CompileReport) -> list[str]:
    """Problems of a report, in words; empty if it may ship."""
    if report.error:
        return [f"does not compile: {report.error}"]
    problems = []
    arch = report.arch
    if report.shared_memory > arch.shared_memory:
        used, limit = report.shared_memory / KB, arch.shared_memory / KB
        problems.append(f"{used:.1f} KB of shared memory, {arch.name} has {limit:.0f} KB a CTA")
    if report.hot_local_loads or report.hot_local_stores:
        loads, stores = report.hot_local_loads, report.hot_local_stores
        problems.append(f"spills in the hot loop: {loads} LDL, {stores} STL")
    if report.unused_barriers:
        names = ", ".join(report.unused_barriers)
        problems.append(f"mbarriers that nothing uses, whose places others get: {names}")
    if report.spec.tensor_core == "any" and not sum(report.tensor_core.values()):
        problems.append("no tensor-core instruction")
    if report.spec.tensor_core == "native" and not report.tensor_core.get(arch.tensor_core):
        problems.append(f"no {arch.tensor_core} instruction")
    problems += report.warnings
    return problems
