# SPDX-License-Identifier: Apache-2.0
"""Compile many specifications in several processes: a line of the table for each."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Generator
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing.process import BaseProcess
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
) -> Generator[tuple[str, list[str]], None, None]:
    """The line and the problems of each specification (arch and name), in the order they end.
    Closed before its end it ends its processes."""
    spawn = multiprocessing.get_context("spawn")
    others = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(processes, mp_context=spawn, initializer=_begin)
    try:
        futures = [pool.submit(_compile_one, arch, name, dump) for arch, name in jobs]
        for future in as_completed(futures):
            yield future.result()
    except BaseException:  # interrupted, or closed: nothing is compiled to its end for nobody
        for worker in set(multiprocessing.active_children()) - others:
            worker.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _begin() -> None:
    """Of a worker: Ctrl-C ends it without a word, and it ends with its parent, however that ends;
    by default it would wait for work for ever."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    if parent := multiprocessing.parent_process():
        threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: BaseProcess) -> None:
    parent.join()
    os._exit(1)


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
