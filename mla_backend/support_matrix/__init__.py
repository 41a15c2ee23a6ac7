# SPDX-License-Identifier: Apache-2.0
"""The support matrix, asked of the code: `python -m mla_backend.support_matrix` prints
docs/support.md, and a test keeps that file current.

Every cell is the answer of the function that decides when the engine starts or a kernel is called;
nothing here is written down twice.
"""

HEAD = """# What is supported

Written by `python -m mla_backend.support_matrix`, which asks the functions that decide when an
engine starts. `no` is refused then, with the words below the table. What was measured, and on which
GPU, is in [benchmarks/results](../benchmarks/results); for the other architectures the kernels are
compiled and checked without a GPU.
"""


def markdown() -> str:
    """The whole page. ImportError where vLLM, torch or Triton is missing."""
    from mla_backend.support_matrix import engine, kernels

    return "\n".join([HEAD, engine.section(), kernels.section()])
