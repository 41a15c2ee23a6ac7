# SPDX-License-Identifier: Apache-2.0
"""The stages of the Hopper kernel that are timed alone: they call its parts, without a GPU too."""

import ast
import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
COMPILE = """
import hopper_stages
from mla_kernels.arch import ARCHS
from mla_kernels.offline.compiler import compile_spec
from mla_kernels.offline.spec import KernelSpec

signature = {"clocks": "*i64", "sink": "*fp32", "scale_log2": "fp32", "loops": "i32"}
found = []
for stage in range(3):
    spec = KernelSpec(
        f"stage/{stage}",
        fn=hopper_stages.stage_kernel,
        signature=signature,
        constexprs={"STAGE": stage},
        options={"num_warps": 4},
        tensor_core="any",
    )
    report = compile_spec(spec, ARCHS[90])
    found.append((report.error, report.spill_store_bytes, sum(report.tensor_core.values()) > 0))
print(found)
"""


def test_every_stage_compiles():
    """In a process of its own: this one's kernels may be the interpreter's."""
    command = [sys.executable, "-c", COMPILE]
    done = subprocess.run(command, cwd=BENCHMARKS, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert ast.literal_eval(done.stdout) == [(None, 0, True)] * 3
