# SPDX-License-Identifier: Apache-2.0
"""How vLLM's processes wait for each other."""

import logging

logger = logging.getLogger("vllm.mla_backend")


def wait_without_yielding() -> None:
    """Let this process poll vLLM's shared memory with `time.sleep(0)` instead of `sched_yield`.

    An engine on a CPU always has a worker process, and both poll throughout a step. On Linux 6.18
    with two cores, calling `sched_yield` that often kept cores from all other processes for
    seconds: requests were answered one after another, and /health after up to 13 s. Steps take the
    same time either way. The switch is vLLM's own, for Python before 3.11.1.
    """
    from vllm.distributed import utils

    if hasattr(utils, "USE_SCHED_YIELD"):
        utils.USE_SCHED_YIELD = False
    else:
        logger.debug("vLLM's processes wait as it chose")
