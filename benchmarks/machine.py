# SPDX-License-Identifier: Apache-2.0
"""What a result was measured on."""

import os
import platform
from pathlib import Path
from typing import Any


def describe_machine() -> dict[str, Any]:
    """CPU, cores this process may use, and the versions that matter."""
    import torch
    import vllm

    names = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    return {
        "cpu": names[0] if names else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "torch": torch.__version__,
        "vllm": vllm.__version__,
    }
