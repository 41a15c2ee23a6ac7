# SPDX-License-Identifier: Apache-2.0
"""`python -m mla_kernels.offline`: compile, print a table, exit 1 if anything may not ship."""

import argparse
import os
import sys
from contextlib import closing
from pathlib import Path

from mla_kernels.arch import AMD, ARCHS, Arch
from mla_kernels.offline.spec import all_specs
from mla_kernels.versions import OLDEST_TRITON, no_triton

_MOST_JOBS = 1024
_STDOUT = 1  # the descriptor


def main(argv: list[str] | None = None) -> int:
    """0 if all may ship, 1 if not or if the output or --dump cannot be written, 130 interrupted."""
    args = _parse(argv)
    try:
        try:
            return _run(args)
        finally:
            sys.stdout.flush()  # what cannot be written fails here, not on the way out
    except KeyboardInterrupt:
        return 130
    except OSError as error:
        # Python flushes again as it ends: into nothing, or it would fail and say so once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), _STDOUT)
        if not isinstance(error, BrokenPipeError):
            print(f"python -m mla_kernels.offline: {error}", file=sys.stderr)
        return 1


def _run(args: argparse.Namespace) -> int:
    import triton

    from mla_kernels.offline.batch import HEADER, compile_all

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
        try:
            args.dump.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            print(f"--dump: {error}", file=sys.stderr)
            return 1
    print(f"triton {triton.__version__}, {len(jobs)} specifications\n{HEADER}", flush=True)
    failed = 0
    with closing(compile_all(jobs, args.jobs, args.dump)) as compiled:
        for line, problems in compiled:
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
    parser.add_argument("--jobs", type=_count, default=2, help="processes")
    parser.add_argument("--dump", type=Path, help="folder for ttgir, ptx and sass")
    args = parser.parse_args(argv)
    if reason := no_triton():  # on a CPU torch brings none; --help needs none
        oldest = "{}.{}".format(*OLDEST_TRITON)
        parser.error(f'{reason}. It compiles the kernels: pip install "triton>={oldest}"')
    from mla_kernels.triton_common.runtime import INTERPRET

    if INTERPRET and not args.list:
        parser.error("expected TRITON_INTERPRET=0 or unset: an interpreted kernel is not compiled")
    return args


def _count(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= _MOST_JOBS:
        raise argparse.ArgumentTypeError(f"expected 1 to {_MOST_JOBS}, got {text!r}")
    return int(text)


def _arch(text: str) -> Arch:
    if text == "amd":
        return AMD
    if not text.isdecimal() or int(text) not in ARCHS:
        raise argparse.ArgumentTypeError(f"expected one of {sorted(ARCHS)} or amd, got {text!r}")
    return ARCHS[int(text)]
