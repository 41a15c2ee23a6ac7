# SPDX-License-Identifier: Apache-2.0
"""Facts of a machine: its compiler, the memory and shared memory of a container."""

import inspect
from types import SimpleNamespace

import pytest

from mla_backend import memory, toolchain
from mla_backend.doctor import facts as facts_module
from mla_backend.doctor import machine
from tests.backend.doctor.healthy import GIB


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


def test_what_must_be_free_is_what_vllm_takes():
    from vllm.engine.arg_utils import EngineArgs

    assert EngineArgs.gpu_memory_utilization == machine.LEAST_FREE
