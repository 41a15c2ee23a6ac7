# SPDX-License-Identifier: Apache-2.0
"""What this process computed with the backend: counters, and the implementation chosen.

The counters count Python calls, one per layer and step; a replayed CUDA graph adds nothing to
`forward_mqa`, so builders count the steps themselves.
"""

import os
from dataclasses import asdict, dataclass


@dataclass
class Counters:
    """Calls since the process started (tokens: rows of q, or rows written)."""

    decode_steps: int = 0
    prefill_steps: int = 0
    forward_mqa_calls: int = 0
    forward_mqa_tokens: int = 0
    forward_mha_calls: int = 0
    forward_mha_tokens: int = 0
    kv_cache_writes: int = 0


COUNTERS = Counters()


def snapshot() -> dict[str, int]:
    """The counters as a plain dict, with the process id."""
    return {"pid": os.getpid(), **asdict(COUNTERS)}
