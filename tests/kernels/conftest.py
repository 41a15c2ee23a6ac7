# SPDX-License-Identifier: Apache-2.0
"""Run the Triton kernels in the interpreter where there is no GPU.

A kernel is bound to the interpreter when its module is imported, so the switch is set here, before
the test modules import any. It is kept out of os.environ: other tests start processes that must not
inherit it.
"""

import pytest
import torch
import triton

if not torch.cuda.is_available():
    triton.knobs.propagate_env = False
    triton.knobs.runtime.interpret = True
    triton.knobs.propagate_env = True


@pytest.fixture(scope="session")
def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"
