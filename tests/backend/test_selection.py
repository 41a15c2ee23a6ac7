# SPDX-License-Identifier: Apache-2.0
"""Who finds the plugin, and that nothing changes unless it is selected."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mla_backend import plugin

DIGEST = Path(__file__).with_name("config_digest.py")


def python(*args, **env):
    """Standard output of a fresh interpreter started in / without PYTHONPATH."""
    environ = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VLLM_PLUGINS")}
    done = subprocess.run(
        [sys.executable, *map(str, args)],
        cwd="/",
        env={**environ, "HF_HUB_OFFLINE": "1", **env},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_selecting_nothing_changes_nothing(demo_checkpoint, llama):
    def digest(**env):
        out = python(DIGEST, demo_checkpoint("v3-default-rope"), llama, **env)
        return json.loads(out.rpartition("DIGEST")[2])

    installed, absent = digest(), digest(VLLM_PLUGINS="none")
    assert installed.pop("platform") == "MlaCpuPlatform"
    assert absent.pop("platform") == "CpuPlatform"
    assert installed == absent
    stock = ("vllm.", "NotImplementedError('MLA is not supported on CPU.')")
    assert all(d["attention class"].startswith(stock) for d in installed.values())


FIND_PLUGIN = """
import multiprocessing


def look(named):
    from vllm.platforms import current_platform
    from vllm.plugins import load_general_plugins
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    load_general_plugins()
    ours = [m for name, m in AttentionBackendEnum.__members__.items()
            if name in ("CUSTOM", "MLA_BACKEND")]
    ours += named
    print("FOUND", type(current_platform).__name__, *(m.get_path() for m in ours), flush=True)


if __name__ == "__main__":
    from vllm.plugins import load_general_plugins
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    load_general_plugins()
    named = [AttentionBackendEnum[name] for name in NAMES]  # as vLLM's config has them
    process = multiprocessing.get_context("spawn").Process(target=look, args=(named,))
    process.start()
    process.join()
"""


def test_spawned_process_started_in_root_finds_the_plugin(tmp_path):
    script = tmp_path / "look.py"
    script.write_text(f"NAMES = {names_of_ours()}\n{FIND_PLUGIN}")
    (found,) = (line for line in python(script).splitlines() if line.startswith("FOUND"))
    paths = [plugin.BACKEND_CLASS] * len(names_of_ours()) * 2
    assert found.split() == ["FOUND", "MlaCpuPlatform", *paths]


def names_of_ours():
    """CUSTOM everywhere; the own name from vLLM 0.32 on, whose enum can grow."""
    import vllm

    from mla_backend import compat

    own = compat.parse_version(vllm.__version__) >= (0, 32)
    return ["CUSTOM", "MLA_BACKEND"] if own else ["CUSTOM"]


def test_register_may_be_called_again():
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    for _ in range(3):
        plugin.register()
    members = AttentionBackendEnum.__members__
    assert [name for name in members if plugin.is_ours(members[name])] == names_of_ours()
    assert not plugin.is_ours(None)


def test_entry_points_are_import_light():
    imported = python(
        "-c", "import sys, mla_backend.plugin; print('vllm' in sys.modules, 'torch' in sys.modules)"
    )
    assert imported.split() == ["False", "False"]


@pytest.fixture
def detectors(monkeypatch):
    """`detectors(cpu=answer, cuda=answer)`: pretend that vLLM's own detection says this."""
    from vllm import platforms

    def pretend(**answers):
        found = {name: (lambda answer=answer: answer) for name, answer in answers.items()}
        monkeypatch.setattr(platforms, "builtin_platform_plugins", found)

    return pretend


CPU = "vllm.platforms.cpu.CpuPlatform"


def test_platform_only_where_vllm_would_choose_the_cpu(detectors, monkeypatch):
    detectors(cuda=None, cpu=CPU)
    assert plugin.cpu_platform() == plugin.CPU_PLATFORM_CLASS
    detectors(cuda="vllm.platforms.cuda.CudaPlatform", cpu=CPU)
    assert plugin.cpu_platform() is None
    detectors(cuda=None, cpu="vllm.platforms.zen_cpu.ZenCpuPlatform")
    assert plugin.cpu_platform() is None
    detectors(cuda=None, cpu=None)
    assert plugin.cpu_platform() is None
    detectors(cuda=None, cpu=CPU)
    monkeypatch.setenv("MLA_BACKEND_CPU_PLATFORM", "0")
    assert plugin.cpu_platform() is None
    monkeypatch.setenv("MLA_BACKEND_CPU_PLATFORM", "nonsense")  # vLLM would drop an error
    assert plugin.cpu_platform() == plugin.CPU_PLATFORM_CLASS


def test_a_failing_detector_counts_as_absent(detectors, monkeypatch):
    from vllm import platforms

    def fail():
        raise RuntimeError("no driver")

    detectors(cpu=CPU)
    monkeypatch.setitem(platforms.builtin_platform_plugins, "xpu", fail)
    assert plugin.cpu_platform() == plugin.CPU_PLATFORM_CLASS


@pytest.mark.parametrize("asked", [None, "TPU_", " TPU_ ,MLA_BACKEND_"])
def test_workers_of_a_ray_cluster_get_our_settings(monkeypatch, asked):
    """Ray starts them without the server's environment, and vLLM copies what it knows."""
    from vllm.ray.ray_env import get_env_vars_to_copy

    name = "VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY"
    monkeypatch.setenv("MLA_BACKEND_FP8_QUERY", "1")
    monkeypatch.setenv("TPU_NAME", "x")
    monkeypatch.setenv(name, asked or "")
    for _ in range(2):
        plugin.register()
    copied = get_env_vars_to_copy()
    assert "MLA_BACKEND_FP8_QUERY" in copied
    assert ("TPU_NAME" in copied) is (asked is not None)
    assert os.environ[name].count("MLA_BACKEND_") == 1


def test_without_settings_nothing_is_changed_for_ray(monkeypatch):
    name = "VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY"
    for setting in [*os.environ]:
        if setting.startswith("MLA_BACKEND_") or setting == name:
            monkeypatch.delenv(setting)
    monkeypatch.setenv("MLA_BACKEND_SERVICE_HOST", "10.0.171.239")  # of Kubernetes, for a Service
    plugin.register()
    assert name not in os.environ


def test_a_misspelt_setting_is_said_without_our_server():
    """`vllm serve` has no check of its own: an unknown variable would have no effect, silently."""
    code = "from vllm.plugins import load_general_plugins; load_general_plugins()"
    command = [sys.executable, "-c", code]
    for name, said in (("MLA_BACKEND_FP8_QUREY", 1), ("MLA_BACKEND_FP8_QUERY", 0)):
        environ = {**os.environ, name: "1"}
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr[-3000:]
        log = done.stdout + done.stderr
        assert log.count(f"{name} is no setting of ours") == said
