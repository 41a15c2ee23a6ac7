# SPDX-License-Identifier: Apache-2.0
"""How much memory there is to take."""

import contextlib
from pathlib import Path

import psutil


def available_bytes(cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Memory that this process may still take: of the machine, or of its container (cgroup v2, v1)
    where that has less. Cached files count as free: a container that has read its weights is full
    of them."""
    free = psutil.virtual_memory().available
    for limit, used, stat, cached in (
        ("memory.max", "memory.current", "memory.stat", "inactive_file"),
        (
            "memory/memory.limit_in_bytes",
            "memory/memory.usage_in_bytes",
            "memory/memory.stat",
            "total_inactive_file",
        ),
    ):
        with contextlib.suppress(OSError, ValueError, KeyError):  # not there; "max" is none
            most, taken = (int((cgroups / name).read_text()) for name in (limit, used))
            shares = dict(line.split() for line in (cgroups / stat).read_text().splitlines())
            free = min(free, max(0, most - taken + int(shares[cached])))
    return free
