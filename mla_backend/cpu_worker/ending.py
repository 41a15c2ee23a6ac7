# SPDX-License-Identifier: Apache-2.0
"""The end of a worker's process.

Python collects garbage before it ends: over all that torch and vLLM have made that takes seconds of
a core, for memory that the kernel takes back anyway. vLLM's engine waits 5 s for its workers before
it ends them by a signal, and our server 10 s for its engine: where other processes want the cores,
both were killed in the middle of it. (vLLM ends its engine so on ROCm.)
"""

import atexit
import gc
import multiprocessing


def end_without_collecting() -> None:
    """Have this process end without a search for garbage, if it is a worker's own: one that a user
    has begun may need what a collection does."""
    if multiprocessing.parent_process() is not None:
        atexit.register(gc.freeze)
