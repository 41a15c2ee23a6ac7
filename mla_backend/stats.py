# SPDX-License-Identifier: Apache-2.0
"""What this process computed with the backend: counters, and the implementation chosen.

The counters count Python calls, one per layer and step; a replayed CUDA graph adds nothing to
`forward_mqa`, so builders count the steps themselves. Of drafts that are one graph they count the
first alone, or none.
"""

import os
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class Stats:
    """Since the process started. Tokens: rows of q, summed over layers."""

    decode: dict[str, str] = field(default_factory=dict)
    sparse: dict[str, str] = field(default_factory=dict)
    decode_steps: int = 0
    prefill_steps: int = 0
    extend_steps: int = 0
    sparse_steps: int = 0
    checked_steps: int = 0
    forward_mqa_calls: int = 0
    forward_mqa_tokens: int = 0
    forward_mha_calls: int = 0
    forward_mha_tokens: int = 0
    indexer_calls: int = 0
    indexer_tokens: int = 0
    kv_cache_writes: int = 0


STATS = Stats()


def snapshot() -> dict[str, Any]:
    """All of it as a plain dict, with the process id. `decode` is empty until a dense layer exists;
    then it names the implementation of mla_decode, the reason for it, the rescale variant and the
    dtype of the queries.
    `sparse` is the same for layers with sparse attention; in place of the dtype it names how the
    indexer's scores are multiplied.
    """
    return {"pid": os.getpid(), **asdict(STATS)}
