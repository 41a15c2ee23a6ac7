# SPDX-License-Identifier: Apache-2.0
"""What launchers of Gluon kernels hand over is what the offline compiler was told: all arguments by
their names, types, boxes and layouts, compile-time constants, options. And no kernel, of Triton
either, has forms by a number that changes from step to step."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from mla_kernels.arch import ARCHS

SCRIPT = Path(__file__).parent / "recorded_launches.py"


@pytest.mark.parametrize("sm", [sm for sm, arch in ARCHS.items() if arch.tensor_core != "mfma"])
def test_every_launch_of_a_gluon_kernel_is_one_that_was_compiled(sm):
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, SCRIPT, str(sm)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
