# SPDX-License-Identifier: Apache-2.0
"""`python -m mla_kernels.offline`: compile, print a table, exit 1 if anything may not ship."""

import argparse
import multiprocessing
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

import triton

from mla_kernels.arch import AMD, ARCHS, KB, Arch
from mla_kernels.offline.check import check
from mla_kernels.offline.compiler import CompileReport, compile_spec
from mla_kernels.offline.spec import all_specs

HEADER = (
    f"{'kernel':56} {'arch':7} {'regs':>20} {'spill B':>11} {'hot':>7} {'smem KB':>8} {'warps':>5}"
    f" {'tensor core':>16} {'s':>5}"
)


def main(argv: list[str] | None = None) -> int:
    args = _parse(argv)
    selected = [
        (arch, spec)
        for arch in args.arch
        for spec in all_specs(arch)
        if all(word in spec.name for word in args.match) and (spec.quick or not args.quick)
    ]
    if args.list:
        for arch, spec in selected:
            print(f"{arch.name} {spec.fn.__name__} {spec.name}")
        return 0
    jobs = [(arch, spec.name) for arch, spec in selected]
    if not jobs:
        print("no specification matches", file=sys.stderr)
        return 1
    if args.dump:
        args.dump.mkdir(parents=True, exist_ok=True)
    print(f"triton {triton.__version__}, {len(jobs)} specifications\n{HEADER}", flush=True)
    failed = 0
    for line, problems in _compile_all(jobs, args.jobs, args.dump):
        print(line)
        for problem in problems:
            print(f"    FAIL {problem}")
        sys.stdout.flush()
        failed += bool(problems)
    print(f"{len(jobs) - failed} of {len(jobs)} may ship")
    return 1 if failed else 0


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m mla_kernels.offline", description=__doc__)
    every = [*(ARCHS[sm] for sm in sorted(ARCHS)), AMD]
    arch = parser.add_argument("--arch", type=_arch, nargs="+", default=every)
    arch.metavar, arch.help = "SM", f"of {', '.join(map(str, sorted(ARCHS)))} or amd; default: all"
    parser.add_argument("--match", nargs="+", default=[], help="all of these words in the name")
    parser.add_argument("--quick", action="store_true", help="one specialisation of each kernel")
    parser.add_argument("--list", action="store_true", help="print arch, kernel and name only")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--dump", type=Path, help="folder for ttgir, ptx and sass")
    return parser.parse_args(argv)


def _arch(text: str) -> Arch:
    if text == "amd":
        return AMD
    if not text.isdecimal() or int(text) not in ARCHS:
        raise argparse.ArgumentTypeError(f"expected one of {sorted(ARCHS)} or amd, got {text!r}")
    return ARCHS[int(text)]


def _compile_all(
    jobs: list[tuple[Arch, str]], processes: int, dump: Path | None
) -> Iterator[tuple[str, list[str]]]:
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
