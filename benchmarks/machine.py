# SPDX-License-Identifier: Apache-2.0
"""What a result was measured on."""

import os
import platform
import shutil
import subprocess
from pathlib import Path
from typing import Any


def describe_machine() -> dict[str, Any]:
    """CPU, cores this process may use, GPU if there is one, and the versions that matter, this
    repository's commit among them."""
    import torch
    import vllm

    names = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    return {
        **({"gpu": smi[0][0]} if (smi := nvidia_smi("name")) else {}),
        "cpu": names[0] if names else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "torch": torch.__version__,
        "vllm": vllm.__version__,
        "commit": commit(),
    }


def commit() -> str:
    """This repository's, "-dirty" behind it if the tree has changes; "unknown" outside of git."""
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def nvidia_smi(*fields: str, of: str = "gpu") -> list[list[str]]:
    """`fields` of each GPU, or of each process ("compute-apps"), without a CUDA context of this
    process; [] where there is none, or no driver, which nvidia-smi says where values would be."""
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", f"--query-{of}={','.join(fields)}", "--format=csv,noheader,nounits"]
    done = subprocess.run(command, capture_output=True, text=True)
    return [] if done.returncode else [line.split(", ") for line in done.stdout.splitlines()]
