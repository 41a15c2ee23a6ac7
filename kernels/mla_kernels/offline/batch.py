# SPDX-License-Identifier: Apache-2.0
"""Compile many specifications in several processes: a line of the table for each."""

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

from mla_kernels.arch import KB, Arch
from mla_kernels.offline.check import check
from mla_kernels.offline.compiler import CompileReport, compile_spec
from mla_kernels.offline.spec import all_specs

HEADER = (
    f"{'kernel':56} {'arch':7} {'regs':>20} {'spill B':>11} {'hot':>7} {'smem KB':>8} {'warps':>5}"
    f" {'tensor core':>16} {'s':>5}"
)


def compile_all(
    jobs: list[tuple[Arch, str]], processes: int, dump: Path | None
) -> Iterator[tuple[str, list[str]]]:
    """The line and the problems of each specification (arch and name), in the order they end."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=spawn) as pool:
        futures = [pool.submit(_compile_one, arch, name, dump) for arch, name in jobs]
        for future in as_completed(futures):
            yield future.result()


def _compile_one(arch: Arch, name: str, dump: Path | None) -> tuple[str, list[str]]:
    """Runs in a worker: kernels cannot be pickled, so it finds the specification again."""
    spec = next(s for s in all_specs(arch) if s.name == name)
    report = compile_spec(spec, arch, dump)
    return _row(report), check(report)


def _row(r: CompileReport) -> str:
    registers = "/".join(map(str, (r.registers, *r.warp_registers)))
    spills = f"{r.spill_store_bytes}/{r.spill_load_bytes}"
    hot = f"{r.hot_local_loads}/{r.hot_local_stores}"
    tensor_core = ",".join(f"{family}:{n}" for family, n in sorted(r.tensor_core.items())) or "-"
    return (
        f"{r.spec.name:56} {r.arch.name:7} {registers:>20} {spills:>11} {hot:>7}"
        f" {r.shared_memory / KB:8.1f} {r.num_warps:5} {tensor_core:>16} {r.seconds:5.1f}"
    )
