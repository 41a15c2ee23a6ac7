# SPDX-License-Identifier: Apache-2.0
"""A replay asks the CUDA driver for the very launch that Triton would ask it for."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
HERE = Path(__file__).parent


@pytest.mark.skipif(shutil.which("gcc") is None, reason="Triton needs a C compiler to launch")
def test_the_driver_sees_the_same_launch(tmp_path):
    stub = tmp_path / "libcuda.so.1"
    gcc = ["gcc", "-shared", "-fPIC", "-O1", "-Wall", "-Werror"]
    subprocess.run([*gcc, "-o", stub, HERE / "stub_libcuda.c"], check=True)
    env = os.environ | {
        "LD_LIBRARY_PATH": str(tmp_path),
        "TRITON_LIBCUDA_PATH": str(tmp_path),
        "TRITON_CACHE_DIR": str(tmp_path / "cache"),
    }
    env.pop("TRITON_INTERPRET", None)
    command = [sys.executable, HERE / "driver_launches.py"]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1:] == ["same"], done.stdout + done.stderr
