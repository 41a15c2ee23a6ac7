# SPDX-License-Identifier: Apache-2.0
"""The command itself, on the machine that runs the tests."""

import json
import os
import subprocess
import sys
from pathlib import Path

from mla_backend.doctor import facts as facts_module


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
