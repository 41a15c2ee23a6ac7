# SPDX-License-Identifier: Apache-2.0
"""Whether torch.compile can work on this machine's CPU. Imports neither torch nor vLLM.

vLLM compiles helper functions even in eager mode (the rank of a token's logprob, for one), so
without a compiler a request for logprobs ends the engine. TORCHDYNAMO_DISABLE=1, set before torch
is imported, makes those functions run uncompiled.
"""

import os
import shutil
import sysconfig
from pathlib import Path


def compile_obstacle() -> str | None:
    """What torch.compile lacks for CPU code: its C++ compiler, Python's headers, or None."""
    compiler = os.environ.get("CXX", "g++")  # where torch's inductor looks
    if shutil.which(compiler) is None:
        return f"no C++ compiler ({compiler})"
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if not header.exists():
        return f"no Python headers ({header})"
    return None
